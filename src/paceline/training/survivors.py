"""Saves the last completed step when a job fails: any ranks that hold a whole copy of the state can.

An update needs the gradients of all ranks, so a rank that fails in step `n` leaves the others with the
weights of step `n - 1`, or of step `n` where the sums had arrived. The ranks that are left write the number
of their last step to the job's store. One that holds the whole model at the newest step saves it alone; of a
sharded model one rank for each shard does. The next start resumes there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from paceline import log
from paceline.errors import CheckpointError, NonFinite, RankDisagreement, name_ranks
from paceline.job import failures
from paceline.job.job import Job
from paceline.parallel.modules import is_split

# How long ranks wait for the answers of others, whose numbers of steps may differ by one. As a rule one has
# been killed, and does not answer. While a part of the model is missing, a rank that computes may bring it.
_ALL_BUT_ONE_S = 0.2
_ALL_S = 1.0
_PARTS_S = 2.0
_POLL_S = 0.005


def may_save(error: BaseException) -> bool:
    """Whether the state is sound after this error: not after NaN, a desync, or an error of the device."""
    unsound = (NonFinite, RankDisagreement, CheckpointError, torch.AcceleratorError)
    return isinstance(error, Exception) and not isinstance(error, unsound)


def parts_of_ranks(job: Job, models: Sequence[nn.Module]) -> list[int]:
    """For each rank which part of the models it holds: ranks with the same number hold the same."""
    ranks = range(job.world_size)
    if not any(map(is_split, models)):
        return [0 for _ in ranks]
    if job.mesh is None:
        return list(ranks)
    return [job.mesh.axis_ranks(rank, "dp_replicate")[0] for rank in ranks]


def save_newest(
    job: Job, folder: str, step: int, parts: Sequence[int], save: Callable[[Job], None]
) -> None:
    """Save the newest step of which all parts are left. Called by each rank that is left, on its own.

    Args:
        folder: Of the checkpoints; the same on all ranks.
        step: The last completed step of this rank.
        parts: See `parts_of_ranks`.
        save: Saves the state of this rank, together with the other ranks of the job that it gets.
    """
    try:
        store = None if job.store is None else dist.PrefixStore(f"survivors/{folder}", job.store)
        writers = _writers(job, store, step, parts)
        if job.rank not in writers:
            return
        began = time.monotonic()
        save(job.among(writers, store))
        if job.rank == writers[0]:
            log.logger.info(
                "the job has failed; %s saved step %d in %s, in %.1f s.",
                f"{name_ranks(writers)} {'has' if len(writers) == 1 else 'have'}",
                *(step, folder, time.monotonic() - began),
            )
    # The failure of the job is the one to report.
    except Exception as error:
        log.logger.warning("step %d could not be saved after the failure: %s", step, error)


def _writers(job: Job, store: dist.Store | None, step: int, parts: Sequence[int]) -> list[int]:
    """The ranks that save, one for each part of the models; none if a part is lost."""
    if store is None:
        return [job.rank]
    store.set(f"{job.rank}", f"{step}")
    store.add("answers", 1)
    answers: list[int] = []
    began = time.monotonic()
    while True:
        if store.add("answers", 0) != len(answers):
            answers = [rank for rank in range(job.world_size) if store.check([f"{rank}"])]
        if {parts[rank] for rank in answers} != set(parts):
            limit_s = _PARTS_S
        else:
            limit_s = _ALL_BUT_ONE_S if len(answers) == job.world_size - 1 else _ALL_S
        num_left = job.world_size - len(failures.killed_ranks.difference(answers))
        if len(answers) == num_left or time.monotonic() - began > limit_s:
            break
        time.sleep(_POLL_S)
    steps = {rank: int(store.get(f"{rank}")) for rank in answers}
    writers: list[int] = []
    for newest in sorted(set(steps.values()), reverse=True):
        holders = {parts[rank]: rank for rank in reversed(answers) if steps[rank] == newest}
        if set(holders) == set(parts):
            writers = sorted(holders.values())
            break
    # A rank that comes late sees more answers: the first one decides.
    decided = json.loads(store.compare_set("writers", "", json.dumps([job.rank, writers])))
    if decided == [job.rank, []]:
        left = {parts[rank] for rank in answers}
        lost = [rank for rank in range(job.world_size) if parts[rank] not in left]
        why = "the ranks that are left have not done the same step"
        if lost:
            why = f"no rank that is left has the shards of {name_ranks(lost)}"
        log.logger.warning(
            "the last step is not saved: %s. The job resumes from its last checkpoint.", why
        )
    saved_by: list[int] = decided[1]
    return saved_by
