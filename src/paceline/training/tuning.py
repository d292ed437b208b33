"""Which bucket size makes a training's steps the fastest, for models that asked for it.

`ddp(..., bucket_mb="auto")` asks; the training's own steps answer, in blocks by turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from paceline import log
from paceline.job.job import Job
from paceline.parallel import reducer
from paceline.training.turns import Turns

_WAYS = {"25 MiB, the first 1 MiB": None, "5 MiB": 5.0, "25 MiB": 25.0, "100 MiB": 100.0}


class BucketTuning:
    """Tries bucket sizes while the training goes on, and stays with what was fastest on rank 0.

    The models of a training are tuned together. Nothing is done where none asked, or where the gradients
    of each fit the smallest bucket.

    Collective: none, but where a method says so.
    """

    def __init__(self, job: Job, models: Sequence[nn.Module]) -> None:
        self._job = job
        found = (reducer.find_wrapper(model) for model in models)
        self._wrappers = [w for w in found if w is not None and reducer.is_tuned(w)]
        self._ways = _distinct(max(map(reducer.gradient_bytes, self._wrappers), default=0))
        self._turns = Turns(job, list(self._ways)) if len(self._ways) > 1 else None
        self._way = next(iter(_WAYS))

    def begin(self) -> None:
        """The first forward of a step begins, if it has not."""
        if self._turns is not None:
            self._turns.begin()

    def stop(self) -> None:
        """The step's last update is done."""
        if self._turns is not None:
            self._turns.stop()

    def step_ended(self, *, active: bool) -> None:
        """Note that a step is over, and take another size for the next one where that is due.

        Args:
            active: Whether nothing else is tried out in these steps.

        Collective: all ranks, after each step.
        """
        if self._turns is None or not active:
            return
        is_final = self._turns.end_step()
        self._use(self._turns.way)
        if is_final:
            if self._job.rank == 0:
                log.logger.info("buckets of %s.", self._turns.verdict)
            self._turns = None

    def _use(self, way: str) -> None:
        if way == self._way:
            return
        self._way = way
        for wrapper in self._wrappers:
            if reducer.is_tuned(wrapper):
                reducer.set_bucket_mb(wrapper, self._ways[way])

    def state_dict(self) -> dict[str, Any]:
        """What was chosen; empty where nothing was, or not yet."""
        return {"chosen": self._way} if len(self._ways) > 1 and self._turns is None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stay with what another run chose, if this one could choose it. Collective: all ranks."""
        if state.get("chosen") in self._ways:
            self._turns = None
            self._use(state["chosen"])


def _distinct(num_bytes: int) -> dict[str, float | None]:
    """The ways that differ for so many bytes of gradients: one that holds them all is the last."""
    ways: dict[str, float | None] = {}
    held_mb = 1.0
    for name, size_mb in _WAYS.items():
        if size_mb is None or held_mb < num_bytes / 2**20:
            ways[name] = size_mb
            held_mb = size_mb or held_mb
    return ways
