"""The text of a hang: `word: line`, more lines, why, fix. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

_MAX_LINES = 10  # of a report


def render(word: str, lines: Sequence[str], why: str, fix: str) -> str:
    """At most 10 lines; those that do not fit are counted."""
    left = _MAX_LINES - bool(why) - bool(fix)
    if len(lines) > left:
        lines = [*lines[: left - 1], f"... and {len(lines) - left + 1} more"]
    text = [f"{word}: {lines[0]}", *(" " * (len(word) + 2) + line for line in lines[1:])]
    text += [f"why:  {why}"] if why else []
    text += [f"fix:  {fix}"] if fix else []
    return "\n".join(text) + "\n"


def group_by_text(things: Iterable[T], text_of: Callable[[T], str]) -> dict[str, list[T]]:
    """The things that have the same text, such as ranks that wait at the same line."""
    groups: dict[str, list[T]] = {}
    for thing in things:
        groups.setdefault(text_of(thing), []).append(thing)
    return groups
