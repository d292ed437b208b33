"""What all recording needs: the file of events of a rank, hooks around functions, lines of the user's source.

Each line of the file is one event as JSON (see `events`). Each line is flushed, so the file contains the
last events before a hang or a kill.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from paceline import torch_private
from paceline.audit.events import Event, OwnRanksStarted, SamplesLoaded
from paceline.watch.stacks import is_script


class Recorder:
    """The log of one rank. A forked loader worker writes its fetches to its own file."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._pid = os.getpid()
        self._file = self._open(f"rank{rank}.jsonl")
        os.register_at_fork(after_in_child=self._open_child_file)

    def write(self, event: Event) -> None:
        """Write one event."""
        if os.getpid() != self._pid and not isinstance(event, SamplesLoaded | OwnRanksStarted):
            return  # a fork of the rank, such as a loader worker
        self._file.write(event.to_json() + "\n")

    @contextmanager
    def span(self, begun: Event, ended: type[Event]) -> Iterator[dict[str, Any]]:
        """Write an event at the beginning and one at the end, which has the entries of the yielded dict.

        If the end is missing, the rank was stopped inside the span.
        """
        self.write(begun)
        found: dict[str, Any] = {}
        try:
            yield found
        except BaseException as error:
            found["raised"] = type(error).__name__
            raise
        finally:
            self.write(ended(**found))

    def _open_child_file(self) -> None:
        self._file = self._open(f"child{self._rank}-{os.getpid()}.jsonl")

    def _open(self, name: str) -> TextIO:
        # buffering=1 flushes each line.
        return open(self._folder / name, "a", buffering=1)


def intercept(name: str, handler: Callable[..., Any], *owners: Any) -> None:
    """Replace a function of a class or of modules: a call goes to `handler(function, *args, **kwargs)`."""
    intercepted = _intercepted(getattr(owners[0], name), handler)
    for owner in owners:
        setattr(owner, name, intercepted)


def intercept_private(path: str, handler: Callable[..., Any]) -> None:
    """The same for a private function of torch, if the installed torch has it."""
    torch_private.wrap(path, functools.partial(_intercepted, handler=handler))


def _intercepted(function: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def intercepted(*args: Any, **kwargs: Any) -> Any:
        return handler(function, *args, **kwargs)

    return intercepted


class Nesting:
    """The depth of nested calls of a function. `with nesting as is_outermost:` goes around each call."""

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> bool:
        self.depth += 1
        return self.depth == 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


def frames() -> Iterator[FrameType]:
    """The frames of the caller, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def user_line() -> str:
    """The innermost line of the user's source."""
    return next((line_of(frame) for frame in frames() if is_user_code(frame)), "")


def calling_frame(between: int = 0) -> FrameType:
    """For a handler: the frame that called the function. `between`: the frames from the handler to here."""
    # Above this frame: the handler, `intercepted`, the caller.
    return sys._getframe(3 + between)


def calling_line() -> str:
    """For a handler: the user's line that called the function; empty if a library did."""
    frame: FrameType | None = calling_frame(between=1)
    if frame is not None and frame.f_code.co_name == "__format__":
        frame = frame.f_back  # of a tensor; it calls `item`
    return line_of(frame) if frame is not None and is_user_code(frame) else ""


def line_of(frame: FrameType) -> str:
    """The line of a frame, such as `train.py:57 in main()`."""
    name = os.path.relpath(frame.f_code.co_filename)
    name = frame.f_code.co_filename if name.startswith("..") else name
    inside = frame.f_code.co_name
    where = "" if inside == "<module>" else f" in {inside}()"
    return f"{name}:{frame.f_lineno}{where}"


def is_user_code(frame: FrameType) -> bool:
    """Whether a frame runs the user's source, not a library or generated code."""
    return _is_user_file(frame.f_code.co_filename)


@functools.cache
def _is_user_file(filename: str) -> bool:
    return is_script(filename) and "<string" not in filename
