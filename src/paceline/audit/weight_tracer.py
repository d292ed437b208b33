"""Finds the line that changes weights outside of the optimizer.

torch has no hook for writes to a parameter, and a write through `.data` does not change its version. So
`sys.settrace` traces the user's lines between two optimizer steps, and after each line a few elements of each
parameter are compared. Forwards and backwards are not traced, because they take most of the time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from paceline.audit.events import WeightsChanged
from paceline.audit.models import Models
from paceline.audit.progress import Progress
from paceline.audit.record import frames, is_user_code, line_of
from paceline.data.digest import plain

# Elements of each parameter that are compared; they are spread evenly over it.
_ELEMENTS = 16


class WeightTracer:
    """The tracer of one rank. It is on in ordinary runs only."""

    def __init__(self, progress: Progress, models: Models) -> None:
        self._progress, self._models = progress, models
        self._is_on = progress.plan.mode == "ordinary"
        self._values: dict[str, Any] = {}
        self._line: tuple[FrameType, int] | None = None

    def start(self) -> None:
        """Start tracing."""
        if not self._is_on:
            return
        self._values = self._elements()
        self._line = None
        for frame in filter(is_user_code, frames()):
            self._line = self._line or (frame, frame.f_lineno)
            frame.f_trace = self._in_frame
        sys.settrace(self._on_call)

    def stop(self) -> None:
        """Stop tracing."""
        if self._is_on:
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
        return self._in_frame if is_user_code(frame) else None

    def _in_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event not in ("line", "return"):
            return self._in_frame
        with self.paused():
            now = self._elements()
            changed = any(self._values.get(name, value) != value for name, value in now.items())
            if changed and self._line is not None:
                at = line_of(*self._line)
                self._progress.recorder.write(
                    WeightsChanged(at=at, steps_done=self._progress.steps)
                )
            self._values = now
            self._line = (frame, frame.f_lineno)
        return self._in_frame

    def _elements(self) -> dict[str, Any]:
        found = {}
        for number, model in enumerate(self._models.called_or_wrapped()):
            for name, parameter in model.named_parameters():
                flat = plain(parameter).reshape(-1)
                stride = max(1, flat.numel() // _ELEMENTS)
                found[f"{number}.{name}"] = flat[::stride].tolist()
        return found
