"""Finds the line that changes weights outside of the optimizer.

torch has no hook for writes to a parameter, and a write through `.data` does not change its version. So
`sys.settrace` traces the user's lines between two optimizer steps, and after each line a few elements of each
parameter are compared. Forwards, backwards and the loading of samples are not traced, because they take most
of the time. After many comparisons the tracer is off, and the line stays unknown.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.nn.parameter import is_lazy

from paceline.audit.events import WeightsChanged
from paceline.audit.models import Models
from paceline.audit.progress import Progress
from paceline.audit.record import frames, is_user_code, line_of
from paceline.data.digest import plain

# Elements of each parameter that are compared; they are spread evenly over it.
_ELEMENTS = 16
# So many reads of a parameter take about 1 s; then the tracer is off for the rest of the run. A number and
# not a time, so that the report does not depend on the speed of the machine.
_MAX_READS = 100_000


class WeightTracer:
    """The tracer of one rank. It is on in ordinary runs only."""

    def __init__(self, progress: Progress, models: Models) -> None:
        self._progress, self._models = progress, models
        self._values: dict[int, Any] = {}
        self._line: tuple[FrameType, int] | None = None  # the one that runs
        self._reads = 0

    def start(self) -> None:
        """Start tracing."""
        if self._progress.plan.mode != "ordinary" or self._reads > _MAX_READS:
            return
        self._values, self._line = self._elements(), None
        for frame in filter(is_user_code, frames()):
            self._line = self._line or (frame, frame.f_lineno)
            frame.f_trace = self._on_event
        sys.settrace(self._on_event)

    def stop(self) -> None:
        """Stop tracing."""
        if self._progress.plan.mode == "ordinary":
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

    def _on_event(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "call":
            return self._on_event if is_user_code(frame) and not _loads_samples() else None
        if event in ("line", "return"):
            with self.paused():
                now = self._elements()
                if self._line and any(
                    self._values.get(key, own) != own for key, own in now.items()
                ):
                    at, steps = line_of(*self._line), self._progress.steps
                    self._progress.recorder.write(WeightsChanged(at=at, steps_done=steps))
                self._values, self._line = now, (frame, frame.f_lineno)
            if self._reads > _MAX_READS:
                self.stop()
        return self._on_event

    def _elements(self) -> dict[int, Any]:
        """Some elements of each parameter, by its id."""
        models = self._models.called_or_wrapped()
        parameters = [p for model in models for p in model.parameters() if not is_lazy(p)]
        self._reads += len(parameters)
        flat = [(id(p), plain(p).reshape(-1)) for p in parameters]
        # NaN is not equal to itself.
        return {
            key: values[:: max(1, len(values) // _ELEMENTS)].nan_to_num().tolist()
            for key, values in flat
        }


def _loads_samples() -> bool:
    return any(str(f.f_globals.get("__name__")).startswith("torch.utils.data") for f in frames())
