"""`Finding`: what limits a run, what to change and the expected gain; and the words that all checks use."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_GAIN = 1.1  # a smaller expected gain is within the noise of a shared machine

_LARGER_SHARE = (
    "check whether it has larger or more samples than the others, or a larger part of the model"
)
# What to do about a phase of the clock that takes long on one rank or on all.
CURES = {
    "data": "load samples in worker processes (num_workers), or make them cheaper",
    "copy": "check the connection between host and device",
    "forward": _LARGER_SHARE,
    "backward": _LARGER_SHARE,
    "optimizer": "check whether it updates more parameters than the others, or does more here",
    "checkpoint": "save less often",
    "evaluation": "evaluate on all ranks together (paceline.evaluate)",
    "logging": "log less often, or in another thread",
    "other": "do that work on all ranks, less often, or in another thread or process",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What limits a run, and what to change.

    Args:
        kind: "data", "collate", "communication", "buckets", "accumulation", "straggler", "checkpoint",
            "evaluation" or "logging".
        title: What was measured: "input-bound: 63 % of the step waits for data on all ranks".
        cure: What to change: "Batches(..., workers=4)".
        gain: Expected factor of the rate: 1.9 means 1.9 times as many samples per second.
        changes: What the cure changes in the training; empty if it trains the same.
        details: How the gain was computed, and what else the cure changes; sentences.
    """

    kind: str
    title: str
    cure: str
    gain: float
    changes: str = ""
    details: str = ""

    def __str__(self) -> str:
        gain = f"{self.gain:.0f}" if self.gain >= 10 else f"{self.gain:.2g}"
        changes = f" ({self.changes})" if self.changes else ""
        return f"{self.title}: {self.cure}, expected {gain}x{changes}"


def percent(share: float) -> str:
    """A share as text: 0.63 is "63 %"."""
    return f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """Seconds as text, with three digits."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
