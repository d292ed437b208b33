"""Saves the last completed step when a job fails: any rank that holds a whole copy of the state can.

An update needs the gradients of all ranks, so a rank that fails in step `n` leaves the others with the
weights of step `n - 1`, or of step `n` where the sums had arrived. The ranks that are left write the number
of their last step to the job's store, and the one with the newest step saves it alone. The next start resumes
there.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from paceline import log
from paceline.errors import CheckpointError, NonFinite, RankDisagreement
from paceline.job.job import Job

# The number of steps may differ by one, so the ranks wait for each other. As a rule one has failed, and does
# not answer.
_ALL_S = 1.0
_ALL_BUT_ONE_S = 0.2
_POLL_S = 0.005


def may_save(error: BaseException) -> bool:
    """Whether the state is sound after this error: not after NaN, a desync, or an error of the device."""
    unsound = (NonFinite, RankDisagreement, CheckpointError, torch.AcceleratorError)
    return isinstance(error, Exception) and not isinstance(error, unsound)


def save_newest(job: Job, folder: str, step: int, save: Callable[[], None]) -> None:
    """Save the state if this rank has the newest one. Called by each rank that is left, on its own.

    Args:
        folder: Of the checkpoints; the same on all ranks.
        step: The last completed step of this rank.
        save: Saves the state of this rank alone.
    """
    try:
        if _is_writer(job, folder, step):
            began = time.monotonic()
            save()
            log.logger.info(
                "the job has failed; rank %d has saved step %d in %s, in %.1f s.",
                *(job.rank, step, folder, time.monotonic() - began),
            )
    # The failure of the job is the one to report.
    except Exception as error:
        log.logger.warning("step %d could not be saved after the failure: %s", step, error)


def _is_writer(job: Job, folder: str, step: int) -> bool:
    if job.store is None:
        return True
    store = dist.PrefixStore(f"survivors/{folder}", job.store)
    store.set(f"{job.rank}", f"{step}")
    began = time.monotonic()
    while True:
        answers = [rank for rank in range(job.world_size) if store.check([f"{rank}"])]
        waited_s = time.monotonic() - began
        limit_s = _ALL_BUT_ONE_S if len(answers) == job.world_size - 1 else _ALL_S
        if len(answers) == job.world_size or waited_s > limit_s:
            break
        time.sleep(_POLL_S)
    steps = {rank: int(store.get(f"{rank}")) for rank in answers}
    newest = max(steps.values())
    return job.rank == min(rank for rank, number in steps.items() if number == newest)
