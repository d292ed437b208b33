"""Writes the events of a rank to its own file, one JSON line for each event.

"k" is the kind of event, "at" the line of the user's source that caused it, "s" the number of completed
steps. Each line is flushed, so the file contains the last events before a hang or a kill.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TextIO

import torch

_LIBRARIES = ("site-packages", "dist-packages", "<frozen", "<string>")
_STDLIB = os.path.dirname(os.__file__) + os.sep
_PACELINE = str(Path(__file__).parents[1]) + os.sep
# Attributes of a dataset are searched for random generators up to this depth.
_MAX_DEPTH = 3


class Recorder:
    """The log of one rank. A forked loader worker writes its fetches to its own file."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._pid = os.getpid()
        self._file = self._open(f"rank{rank}.jsonl")
        os.register_at_fork(after_in_child=self._open_child_file)

    def write(self, kind: str, **facts: Any) -> None:
        """Write one event."""
        if os.getpid() != self._pid and kind != "fetch":
            return  # a fork of the rank, such as a loader worker
        self._file.write(json.dumps({"k": kind, **facts}, default=str) + "\n")

    @contextmanager
    def span(self, kind: str, **facts: Any) -> Iterator[dict[str, Any]]:
        """Write an event at the beginning and one at the end, which has the entries of the yielded dict.

        If the end is missing, the rank was stopped inside the span.
        """
        self.write(kind, **facts)
        found: dict[str, Any] = {}
        try:
            yield found
        except BaseException as error:
            found["raised"] = type(error).__name__
            raise
        finally:
            self.write(f"{kind}-end", **found)

    def _open_child_file(self) -> None:
        self._file = self._open(f"child{self._rank}-{os.getpid()}.jsonl")

    def _open(self, name: str) -> TextIO:
        # buffering=1 flushes each line.
        return open(self._folder / name, "a", buffering=1)


def user_line() -> str:
    """The innermost line of the user's source."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            return line_of(frame)
        frame = frame.f_back
    return ""


def line_of(frame: FrameType, line: int | None = None) -> str:
    """The line of a frame, such as `train.py:57 in main()`."""
    name = os.path.relpath(frame.f_code.co_filename)
    name = frame.f_code.co_filename if name.startswith("..") else name
    inside = frame.f_code.co_name
    where = "" if inside == "<module>" else f" in {inside}()"
    return f"{name}:{frame.f_lineno if line is None else line}{where}"


@functools.cache
def is_user_code(filename: str) -> bool:
    """Whether a source file belongs to the user and not to a library."""
    return not filename.startswith((_PACELINE, _STDLIB)) and not any(
        x in filename for x in _LIBRARIES
    )


def digest(value: Any) -> str:
    """A hash of the content of a sample, a batch or a tensor, as 16 hex digits."""
    content = hashlib.sha256()
    for leaf in leaves(value):
        _update(content, leaf)
    return content.hexdigest()[:16]


def leaves(value: Any) -> Iterator[Any]:
    """The tensors, arrays and other values inside nested containers, in order."""
    if isinstance(value, Mapping):
        for key in value:
            yield from leaves(value[key])
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from leaves(getattr(value, each.name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a DTensor, a dense copy of a sparse tensor, or the tensor itself; detached."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return (local if local.layout is torch.strided else local.to_dense()).detach()


def _update(content: Any, leaf: Any) -> None:
    if isinstance(leaf, torch.Tensor):
        content.update(f"{tuple(leaf.shape)}{leaf.dtype}".encode())
        flat = plain(leaf).cpu().contiguous().reshape(-1)
        content.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
    elif hasattr(leaf, "tobytes"):
        content.update(leaf.tobytes())
    else:
        content.update(repr(leaf).encode())


def exact_parts(value: Any) -> str:
    """Digest of the integers and texts in a sample, which augmentation does not change; empty if none."""
    kept = [leaf for leaf in leaves(value) if _is_exact(leaf)]
    return digest(kept) if kept else ""


def _is_exact(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return not leaf.is_floating_point() and leaf.dtype is not torch.uint8
    kind = getattr(getattr(leaf, "dtype", None), "kind", None)
    return kind == "i" if kind is not None else isinstance(leaf, int | str)


def random_states(holder: Any = None) -> dict[str, str]:
    """Digests of the states of all known random generators, including those inside `holder`."""
    states = {"torch": digest(torch.get_rng_state()), "random": digest(repr(random.getstate()))}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = digest(numpy.random.get_state())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = digest(torch.cuda.get_rng_state())
    states.update(_states_inside(holder, "dataset", 0))
    return states


def _states_inside(holder: Any, name: str, depth: int) -> dict[str, str]:
    """The digests of the generators in an object and in its attributes, by their path."""
    state = _generator_state(holder)
    if state is not None:
        return {name: digest(state)}
    found: dict[str, str] = {}
    is_closed = isinstance(holder, type | ModuleType | torch.Tensor | torch.nn.Module)
    if depth < _MAX_DEPTH and hasattr(holder, "__dict__") and not is_closed:
        for key, value in vars(holder).items():
            found.update(_states_inside(value, f"{name}.{key}", depth + 1))
    return found


def _generator_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return repr(value.getstate())
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    return repr(value.get_state()) if isinstance(value, numpy.random.RandomState) else None
