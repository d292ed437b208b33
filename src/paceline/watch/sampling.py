"""Samples the stack of a rank's main thread: how long it is in which phase of a training step.

Runs in each rank. launch/worker.py loads this file without importing the package `paceline`, so it may import
only the standard library and stacks.py.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
from types import FrameType

from paceline.watch.stacks import place_of_frame

_SAMPLES = 200  # of a profile
# Files that show what a rank does. If several are in a stack, the first phase of this list counts.
PHASES = {
    "checkpoint": (
        *("torch/serialization.py", "torch/distributed/checkpoint/", "/safetensors/"),
        "paceline/checkpoint/",
    ),
    "data": ("torch/utils/data/", "paceline/data/"),
    "backward": ("torch/autograd/graph.py", "torch/autograd/__init__.py"),
    "optimizer": (
        *("torch/optim/", "torch/nn/utils/clip_grad.py"),
        *("paceline/training/clipping.py", "paceline/training/optimizers.py"),
    ),
    "forward": ("torch/nn/",),
}
NO_PHASE = "other code"
GARBAGE = "garbage collection"
WAITING = "waiting"  # for other ranks
_WAITS = (
    *("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py"),
    "paceline/shm/",
)
_WAITS_DEPTH = 3  # innermost frames in which a wait for other ranks shows


def profile(thread: int, seconds: float) -> list[tuple[str, str, float]]:
    """What a thread does from now on, as (phase, place, seconds) in order of time."""
    spent: list[tuple[str, str, float]] = []
    # Seconds of finished garbage collections; when the running one began (0 if none runs), and where.
    pauses = (0.0, 0.0, "")

    def on_collection(phase: str, _: dict[str, int]) -> None:
        nonlocal pauses
        now, (over_s, began, place) = time.perf_counter(), pauses
        if phase == "start":
            pauses = (over_s, now, place_of_frame(sys._getframe(1)))
        elif began:
            pauses = (over_s + now - began, 0.0, place)

    first = last = time.perf_counter()
    counted_s = 0.0
    gc.callbacks.append(on_collection)
    try:
        while last < first + seconds:
            time.sleep(seconds / _SAMPLES)
            # No thread runs during a collection, so its time does not belong to this sample. This thread
            # may also come to run within the callback itself.
            now, (over_s, began, place) = time.perf_counter(), pauses
            over_s += now - began if began else 0.0
            garbage_s = over_s - counted_s
            if garbage_s:
                spent.append((GARBAGE, place, garbage_s))
            spent.append((*_phase_of(sys._current_frames().get(thread)), now - last - garbage_s))
            last, counted_s = now, over_s
    finally:
        gc.callbacks.remove(on_collection)
    return spent


def _phase_of(frame: FrameType | None) -> tuple[str, str]:
    """The phase of a stack, and its line of the script."""
    place, index, depth = place_of_frame(frame), len(PHASES), 0
    while frame is not None:
        waits, found = classify(frame.f_code.co_filename)
        if waits and depth < _WAITS_DEPTH:
            return WAITING, place
        index, depth, frame = min(index, found), depth + 1, frame.f_back
    return [*PHASES, NO_PHASE][index], place


@functools.cache
def classify(file: str) -> tuple[bool, int]:
    """Whether a file waits for other ranks, and the index of its phase."""
    phases = [any(part in file for part in parts) for parts in PHASES.values()]
    return any(part in file for part in _WAITS), [*phases, True].index(True)
