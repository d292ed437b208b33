"""Which of several ways to do a step is the fastest, found out on the training's own steps.

The ways take turns in blocks of a few steps, several rounds of them, so that a host that grows slower or
faster meanwhile does so for all; the first round warms up and is not counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from paceline.job import collectives
from paceline.job.job import Job

_BLOCK_STEPS = 4
_ROUNDS = 4
_GAIN = 1.03  # less than that may be noise


class Turns:
    """Blocks of steps in each of `ways` by turns; at the end all ranks take what was fastest on rank 0.

    Args:
        ways: Names; the first is taken unless another is clearly faster.

    Attributes:
        way: The one that the present step takes, at the end the fastest.
        verdict: What was found, in words; empty until the end.

    Collective: none, but where a method says so.
    """

    def __init__(self, job: Job, ways: Sequence[str]) -> None:
        self._job = job
        self._ways = list(ways)
        self._blocks_s: list[float] = []
        self._num_steps = 0
        self._spent_s = 0.0
        self._began: float | None = None
        self.way = self._ways[0]
        self.verdict = ""

    def begin(self) -> None:
        """What is timed of a step begins, unless it has begun already."""
        if self._began is None:
            self._began = time.perf_counter()

    def stop(self) -> None:
        """What is timed of a step ends, unless it has ended already."""
        if self._began is not None:  # else this rank had no samples
            self._spent_s += time.perf_counter() - self._began
            self._began = None

    def end_step(self) -> bool:
        """Whether `way` is final; else it may be another one from the next step on.

        Collective: all ranks.
        """
        self._num_steps += 1
        ends = self._num_steps == _BLOCK_STEPS
        if ends and self._job.device.type != "cpu":
            torch.get_device_module(self._job.device).synchronize()
        self.stop()
        if not ends:
            return False
        self._blocks_s.append(self._spent_s)
        self._num_steps, self._spent_s = 0, 0.0
        if len(self._blocks_s) < _ROUNDS * len(self._ways):
            self.way = self._ways[len(self._blocks_s) % len(self._ways)]
            return False
        best, gain = collectives.on_rank0(self._job, self._fastest)
        self.way = self._ways[best]
        self.verdict = f"{self.way}; no other was clearly faster"
        if best > 0:
            self.verdict = f"{self.way}, {gain:.2f} times as fast as {self._ways[0]}"
        return True

    def _fastest(self) -> tuple[int, float]:
        count = len(self._ways)
        each_s = [statistics.median(self._blocks_s[count + n :: count]) for n in range(count)]
        best = min(range(count), key=lambda n: each_s[n])
        gain = each_s[0] / max(each_s[best], 1e-9)
        return (best if gain > _GAIN else 0), gain
