"""The newest state in memory that outlives the ranks: the host lives, all of them are dead, little is lost.

A shadow is a checkpoint like any other, with its commit and its digests, in a folder of `/dev/shm` that
belongs to the launcher. It is taken so often that it costs at most 3 % of the time.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from paceline import log
from paceline.checkpoint.manager import Checkpoints
from paceline.checkpoint.store import committed, open_store
from paceline.errors import SaveFailed
from paceline.job import collectives
from paceline.job.job import Job

SHARE = 0.02  # of the time; the rest of 3 % is for what a save slows down besides
ROOT = "PACELINE_SHADOW"  # where the launcher says which folder is its own


class Shadow:
    """The shadow of one training's checkpoints.

    Args:
        folder: Of the checkpoints on disk, which it belongs to.

    Attributes:
        kept: Where shadows are; None where there can be none, as the log says.

    Collective: all ranks.
    """

    def __init__(self, job: Job, folder: str | os.PathLike[str]) -> None:
        self._job = job
        root, why = os.environ.get(ROOT, ""), ""
        if not root:
            why = "only `paceline run` keeps the memory of ranks that died"
        elif job.local_world_size != job.world_size:
            why = "ranks of several hosts share no memory"
        if why and job.rank == 0:
            log.logger.warning("shadow=True has no effect: %s.", why)
        if not why:
            os.makedirs(root, mode=0o700, exist_ok=True)  # others can list /dev/shm
        name = hashlib.sha256(os.path.abspath(folder).encode()).hexdigest()[:16]
        self.kept = None if why else Checkpoints(f"{root}/{name}", keep=1)
        if self.kept is not None:
            self.kept.may_be_lost = True
        self._every_steps = 1
        self._due = 0
        self._began = self._stall_s = 0.0

    def resume(
        self,
        newer_than: int,
        like: Callable[[str], torch.Tensor | None],
        size_bytes: int,
    ) -> Any:
        """The state in memory, if it is of a later step than that on disk; else None.

        Collective: all ranks.
        """
        if self.kept is None:
            return None
        store = open_store(self.kept.folder)
        newest = collectives.on_rank0(self._job, lambda: max(committed(store), default=0))
        if 0 < newest <= newer_than:
            return None
        # Two of them are there for a moment, and a file system of memory is soon full.
        room = 0 if newest else 2 * size_bytes
        try:
            state = self.kept.resume(self._job, like=like, size_bytes=room)
        except SaveFailed as error:
            self._give_up(f"{error}")
            return None
        if state is not None and self._job.rank == 0:
            log.logger.info(
                "step %d was still in memory; the newest on disk is %s.",
                *(self.kept.last_saved, f"step {newer_than}" if newer_than else "none"),
            )
        return state

    def step_ended(self, step: int, save: Callable[[Checkpoints], None]) -> None:
        """Have `save` save this step, if it is its turn. Collective: all ranks."""
        if self.kept is None or step < self._due:
            return
        began = time.monotonic()
        last = self.kept.in_flight
        self.kept.finish(self._job)
        if last and self.kept.last_saved != last:
            self._give_up("the last one could not be kept")
            return
        if last:
            # Rank 0's clock: all must come to the same.
            self._every_steps = collectives.on_rank0(
                self._job, lambda: self._pace(step - last, began)
            )
        save(self.kept)
        self._due = step + self._every_steps
        self._began, self._stall_s = began, time.monotonic() - began

    def _pace(self, num_steps: int, now: float) -> int:
        assert self.kept is not None
        cost_s = self._stall_s + self.kept.written_s
        step_s = max((now - self._began - self._stall_s) / num_steps, 1e-6)
        return max(1, math.ceil(cost_s / (SHARE * step_s)))

    def _give_up(self, why: str) -> None:
        self.kept = None
        if self._job.rank == 0:
            log.logger.warning("no shadow is kept from here on: %s", why)
