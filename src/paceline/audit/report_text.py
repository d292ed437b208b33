"""The layout of findings and lists in the reports of `paceline verify`."""

from __future__ import annotations

from collections.abc import Sequence


def finding(first: str, **parts: str) -> list[str]:
    """A finding as text: its first line, then a line for each part."""
    return [first, *(f"  {name + ':':6} {text}" for name, text in parts.items()), ""]


def section(title: str, lines: Sequence[str]) -> list[str]:
    """Lines of a report under their title and number; none if there are none."""
    return [f"{title} ({len(lines)}):", *(f"  {line}" for line in lines)] if lines else []
