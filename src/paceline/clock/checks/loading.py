"""Samples that the steps wait for: more loader workers, or cheaper samples.

A rank without loader workers takes d seconds to produce the batches of a step. w workers take d/w, at the
same time as the rest of the step; they measure d themselves. More workers only help if the present ones are
busy nearly all the time. A step cannot take less than the CPU time that the ranks and workers of a host need,
divided by its cores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean

from paceline.clock.evidence import Evidence
from paceline.clock.finding import LEAST_GAIN, Finding, duration, percent
from paceline.errors import name_ranks

_LEAST_DATA_SHARE = 0.05  # of a step; a rank that waits less for data does not count
_LARGE_DATA_SHARE = 0.3  # of a step; above it there is advice even if the host has no free cores
_BUSY_SHARE = 0.8  # of the time of workers; if they work less, a rank waits for something else
_HIDDEN_SHARE = 0.8  # of the rest of a step; workers that produce a batch in this time are enough
_MOST_WORKERS = 16
_USABLE_SHARE = 0.9  # of the time of the cores; workers have costs of their own
_COLLATE_SHARE = 0.5  # of the loading; above it the collate function is named


def check(evidence: Evidence) -> Iterator[Finding]:
    """Workers, or more of them, if the ranks wait for data."""
    data_s, run, step_s = evidence.spent_s["data"], evidence.run, evidence.step_s
    workers = run.get("workers")
    if workers is None:
        return
    waiting = [rank for rank in evidence.ranks if data_s[rank] >= _LEAST_DATA_SHARE * step_s]
    # If only some ranks wait, they are stragglers. But workers read ahead: if they are equally slow on all
    # ranks, the wait can be on the rank whose workers began last, and the other ranks wait for this one.
    if not waiting or (not workers and len(waiting) < len(evidence.ranks)):
        return
    # Seconds that one process needs for the batches of a step; w busy workers deliver w times as often.
    produce_s = max(evidence.load_s, default=0.0) if workers else max(data_s)
    busy = produce_s / (workers * step_s) if workers else 1.0
    if busy < _BUSY_SHARE:
        return
    rest_s = max(evidence.own_s(rank, {"data"}) for rank in evidence.ranks) + evidence.exposed_s
    cores, share = run.get("cores", 1), fmean(data_s[rank] for rank in waiting) / step_s
    details = (
        f"Each rank needs {duration(produce_s)} to produce the batches of a step, and the rest of the step "
        f"takes {duration(rest_s)}."
    )
    wanted, new_s = _with_workers(evidence, produce_s, rest_s, workers, cores)
    if wanted <= workers:  # the most that is advised
        return
    option = "DataLoader(..., num_workers=" if run.get("dataloader") else "Batches(..., workers="
    cure = f"{option}{wanted})"
    if step_s < LEAST_GAIN * new_s and share > _LARGE_DATA_SHARE:
        wanted, new_s = _with_workers(evidence, produce_s, rest_s, workers, 2 * cores)
        cure = f"samples that cost less, or {2 * cores} cores with {option}{wanted})"
        details += f" The {cores} cores of the host are busy, so more workers alone would not help."
    where = f" on {name_ranks(waiting, len(evidence.ranks))}" if len(evidence.ranks) > 1 else ""
    in_collate = fmean(evidence.collate_s or [0.0]) / fmean(data_s)
    if in_collate > _COLLATE_SHARE:
        where += f", {percent(in_collate)} of that in the collate function"
    if workers:
        where += f", {workers} worker{'s' if workers > 1 else ''} busy {percent(min(busy, 1.0))}"
    yield Finding(
        kind="collate" if in_collate > _COLLATE_SHARE else "data",
        title=f"input-bound: {percent(share)} of the step waits for data{where}",
        cure=cure,
        gain=step_s / new_s,
        details=details,
    )


def _with_workers(
    evidence: Evidence, produce_s: float, rest_s: float, workers: int, cores: int
) -> tuple[int, float]:
    """How many workers a rank needs, at least one more than now, and the length of a step with them."""
    local_ranks = evidence.run.get("local_world_size", len(evidence.ranks))
    if evidence.cpu_s:
        least_s = fmean(evidence.cpu_s) * local_ranks / (_USABLE_SHARE * cores)
    else:  # unknown: as if loading used a core all the time
        least_s = produce_s * local_ranks / cores
    bound_s = max(rest_s, least_s, produce_s / (_HIDDEN_SHARE * _MOST_WORKERS))
    wanted = min(max(math.ceil(produce_s / (_HIDDEN_SHARE * bound_s)), workers + 1), _MOST_WORKERS)
    return wanted, max(rest_s, least_s, produce_s / wanted)
