"""Finds the line that changes weights outside of the optimizer.

torch has no hook for writes to a parameter, and a write through `.data` does not change its version. So the
user's lines between two optimizer steps are traced, and a few elements of each parameter are compared after
each line. Forwards and backwards, which take most of the time, are not traced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from paceline.audit.models import Models
from paceline.audit.progress import Progress
from paceline.audit.record import is_user_code, line_of, plain

_ELEMENTS = 16


class Changes:
    """The tracer of one rank; it works in ordinary runs only."""

    def __init__(self, progress: Progress, models: Models) -> None:
        self._progress, self._models = progress, models
        self._wanted = progress.plan.mode == "ordinary"
        self._values: dict[str, Any] = {}
        self._line: tuple[FrameType, int] | None = None
        self._users: dict[str, bool] = {}

    def start(self) -> None:
        """Start to trace."""
        if not self._wanted:
            return
        self._values = self._look()
        self._line = None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if self._is_users(frame):
                self._line = self._line or (frame, frame.f_lineno)
                frame.f_trace = self._in_frame
            frame = frame.f_back
        sys.settrace(self._on_call)

    def stop(self) -> None:
        """Stop to trace."""
        if self._wanted:
            sys.settrace(None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not trace inside."""
        tracing = sys.gettrace()
        sys.settrace(None)
        try:
            yield
        finally:
            sys.settrace(tracing)

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._in_frame if self._is_users(frame) else None

    def _in_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event not in ("line", "return"):
            return self._in_frame
        with self.paused():
            now = self._look()
            changed = [
                name for name, value in now.items() if self._values.get(name, value) != value
            ]
            if changed and self._line is not None:
                at = line_of(*self._line)
                self._progress.recorder.write(
                    "changed", s=self._progress.steps, at=at, names=changed
                )
            self._values = now
            self._line = (frame, frame.f_lineno)
        return self._in_frame

    def _look(self) -> dict[str, Any]:
        found = {}
        for number, model in self._models.watched().items():
            for name, parameter in model.named_parameters():
                flat = plain(parameter).reshape(-1)
                stride = max(1, flat.numel() // _ELEMENTS)
                found[f"{number}.{name}"] = flat[::stride].tolist()
        return found

    def _is_users(self, frame: FrameType) -> bool:
        name = frame.f_code.co_filename
        if name not in self._users:
            self._users[name] = is_user_code(name)
        return self._users[name]
