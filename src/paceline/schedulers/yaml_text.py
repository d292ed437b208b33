"""YAML with comments, for files that people read and change: mappings, lists, texts and numbers."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_WIDTH = 100
# Texts that every YAML parser reads as texts. Others are quoted: "yes", "1e3", "12:30", "- a", "a: b".
_PLAIN = re.compile(r"(--)?[A-Za-z_/][\w./=@:+-]*(?<!:)|[1-9]\d*[MG]i")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


@dataclass(frozen=True)
class Commented:
    """A value of a mapping or list with a comment on the lines before it."""

    value: Any
    comment: str


def to_yaml(*documents: Any, comment: str = "") -> str:
    """Write documents one after the other, with a comment before the first."""
    parts = ["".join(f"{line}\n" for line in _block(document, "")) for document in documents]
    head = "".join(f"{line}\n" for line in _comment(comment, ""))
    return head + "---\n".join(parts)


def _comment(text: str, indent: str) -> list[str]:
    width = _WIDTH - len(indent) - 2
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, width) or [""]]
    return [f"{indent}# {line}".rstrip() for line in lines]


def _block(value: Any, indent: str) -> list[str]:
    lines: list[str] = []
    if isinstance(value, Mapping):
        for key, item in value.items():
            lines += _item(f"{_scalar(key)}:", item, indent, indent + "  ")
    else:
        for item in value:
            lines += _element(item, indent)
    return lines


def _item(start: str, item: Any, indent: str, inner: str) -> list[str]:
    lines: list[str] = []
    if isinstance(item, Commented):
        lines, item = _comment(item.comment, indent), item.value
    if _is_scalar(item):
        return [*lines, f"{indent}{start} {_scalar(item)}"]
    return [*lines, f"{indent}{start}", *_block(item, inner)]


def _element(item: Any, indent: str) -> list[str]:
    lines: list[str] = []
    if isinstance(item, Commented):
        lines, item = _comment(item.comment, indent), item.value
    if _is_scalar(item):
        return [*lines, f"{indent}- {_scalar(item)}"]
    first, *others = _block(item, indent + "  ")
    if first.lstrip().startswith("#"):
        raise ValueError(
            "the first key of an element cannot have a comment; put it before the element"
        )
    return [*lines, f"{indent}- {first.lstrip()}", *others]


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Mapping | Sequence) or isinstance(value, str) or not value


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
            return value
        # YAML 1.1 has line ends that are not ASCII. JSON writes a character above U+FFFF as a surrogate pair,
        # which YAML refuses.
        escaped = (json.dumps(c)[1:-1] if c <= "\uffff" else f"\\U{ord(c):08X}" for c in value)
        return f'"{"".join(escaped)}"'
    if isinstance(value, int | float):
        return str(value)
    return json.dumps(value)  # empty mappings and lists
