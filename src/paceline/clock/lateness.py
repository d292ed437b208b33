"""When a rank counts as slower than the others, and what is said about it.

`clock/judge.py` finds such a rank by the waits of the step clock, and `watch/straggler.py` by the times at
which ranks enter collectives, also in scripts that do not import paceline.
"""

from __future__ import annotations

from collections.abc import Sequence

_LEAST_WAIT_S = 1e-3  # per step; less is scheduler noise
_LEAST_SHARE = 0.13  # of a step
_CHECK_SHARE = (
    "check whether it has larger or more samples than the others, or a larger part of the model"
)
# What to do about a rank that takes longer in this phase, of the clock or of a profile of stacks.
CURES = {
    "data": "load its samples in worker processes (num_workers), or make them cheaper",
    "copy": "check the connection between its host and its device",
    "forward": _CHECK_SHARE,
    "backward": _CHECK_SHARE,
    "optimizer": "check whether it updates more parameters than the others, or does more here",
    "garbage collection": "call gc.freeze() after setup; or gc.disable(), and gc.collect() on all ranks in "
    "the same step",
    "checkpoint": "save less often, in the background, or on all ranks together (paceline.Checkpoints)",
    "evaluation": "evaluate on all ranks together (paceline.evaluate)",
    "logging": "log less often, or in another thread",
    "the script": "do that work on all ranks, less often, or in another thread or process",
}
CURES["other"] = CURES["the script"]


def is_long(wait_s: float, step_s: float) -> bool:
    """Whether the others wait long enough for a rank, in each step of `step_s`."""
    return wait_s >= max(_LEAST_WAIT_S, _LEAST_SHARE * step_s)


def is_steady(values: Sequence[float]) -> bool:
    """Whether most values are about as large as the median. Random values would have both signs."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4] > ordered[len(ordered) // 2] / 2 > 0


def factor_of(own_s: float, wait_s: float, step_s: float) -> float:
    """The own time of a rank in a step, by that of the others, who wait for it."""
    return own_s / max(own_s - wait_s, 0.01 * step_s)


def slow_ranks(
    names: str, factor: float, wait_s: float, step_s: float, *, several: bool = False
) -> str:
    """The sentence about a rank, or several, that the others wait for."""
    takes, it = ("take", "them") if several else ("takes", "it")
    return (
        f"{names} {takes} {factor:.2f}x the time of the others: they wait {duration(wait_s)} for {it} in "
        f"each step of {duration(step_s)}"
    )


def duration(seconds: float) -> str:
    """Seconds as text, with three digits."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
