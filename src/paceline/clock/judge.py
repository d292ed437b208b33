"""Says what limits a run and what to change: the record of its steps in, findings out. Pure.

Ranks wait for each other in each step, so a step takes equally long on all of them. The rank that waits least
is the slowest one. What every rank waits in the same step is the communication itself; what another rank
waits beyond that, it waits for the slowest rank. A phase of a rank that waits for another one costs nothing.

A finding has the share of a step that it is about. Without it a step would take 1 - share of its time, so the
rate grows by at most 1 / (1 - share). Of each phase the median over the windows counts, so that a pause in
one of them changes nothing. The first window has the warm-up and is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.clock.record import Record, Window
from paceline.clock.step_clock import PHASES
from paceline.errors import name_ranks

CHECKED = "data, slow ranks, communication and checkpoints"
_LEAST_SHARE = 0.13  # of a step; less is within the noise of a shared machine
_LEAST_S = 1e-3  # of a step; less is noise of the scheduler
_LEAST_WINDOWS = 3
_NEWEST_ROWS = 2000  # ranks times windows, each of about 1 KB, that a training keeps
_LEAST_NEWEST = 10  # windows
_MOST_ROWS = 20_000  # ranks times windows; more take seconds to judge and change nothing

# What to do about a phase that takes longer on some ranks.
_LARGER = (
    "check whether it has larger or more samples than the others, or a larger part of the model"
)
_FIXES = {
    "forward": _LARGER,
    "backward": _LARGER,
    "optimizer": "check whether it updates more parameters than the others, or does more here",
    "checkpoint": "save less often",
    "evaluation": "evaluate on all ranks together (paceline.evaluate)",
    "other": "do that work on all ranks, less often, or in another thread or process",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What limits a run, and what to change.

    Args:
        kind: "data", "communication", "straggler" or "checkpoint".
        title: What was measured: "input-bound: 63 % of the step waits for data on all ranks".
        fix: What to change first: "Batches(..., workers=4)".
        share: Of the time of a step: what goes if the fix removes all of it.
    """

    kind: str
    title: str
    fix: str
    share: float

    @property
    def gain(self) -> float:
        """The largest possible factor of the rate: 1.9 means 1.9 times as many samples per second."""
        return 1 / (1 - min(self.share, 0.99))

    def __str__(self) -> str:
        rest = 1 / self.gain
        return (
            f"{self.title}: {self.fix}. If this cost nothing, a step would take {100 * rest:.0f} % of its "
            f"time ({self.gain:.1f} times as fast)"
        )


def num_newest(num_ranks: int) -> int:
    """The number of the newest windows that the advice of a training, and of `paceline top`, is about."""
    return max(_LEAST_NEWEST, _NEWEST_ROWS // num_ranks)


def judge(record: Record) -> list[Finding] | None:
    """What limits a run, the largest gain first; None if its newest start was too short to tell."""
    began = record.run.get("step", 0)
    windows = [window for window in record.windows if window.step > began][1:]
    if len(windows) < _LEAST_WINDOWS:
        return None
    num_ranks = windows[-1].num_ranks
    windows = [window for window in windows if window.num_ranks == num_ranks]
    windows = windows[:: 1 + len(windows) * num_ranks // _MOST_ROWS]
    steps = _Steps(windows, record.run)
    checks = (_slow_ranks, _data, _communication, _checkpoints)
    findings = [finding for check in checks for finding in check(steps)]
    return sorted(findings, key=lambda finding: -finding.gain)


class _Steps:
    """The windows of a run, reduced to one step.

    Attributes:
        spent_s: By phase, the seconds of each rank in one step.
        step_s: The length of a step.
    """

    def __init__(self, windows: Sequence[Window], run: Mapping[str, Any]) -> None:
        self.windows, self.run = windows, run
        self.ranks = range(windows[-1].num_ranks)
        self.spent_s = {
            phase: [_median([w.per_step(phase, rank) for w in windows]) for rank in self.ranks]
            for phase in PHASES
        }
        self.step_s = sum(map(sum, self.spent_s.values())) / len(self.ranks)

    def is_long(self, seconds: float) -> bool:
        """Whether so many seconds in each step limit the run."""
        return seconds >= max(_LEAST_S, _LEAST_SHARE * self.step_s)


def _slow_ranks(steps: _Steps) -> Iterator[Finding]:
    """The slowest rank, with those that the others wait for nearly as long."""
    waits_s = steps.spent_s["communication"]
    if len(steps.ranks) < 2:
        return
    slowest = min(steps.ranks, key=lambda rank: waits_s[rank])
    # How much longer than the slowest rank at least half of the others wait, in each window.
    waited_s = sorted(
        _median_low([w.per_step("communication", rank) for rank in steps.ranks if rank != slowest])
        - w.per_step("communication", slowest)
        for w in steps.windows
    )
    usual_s = _median(waited_s)
    # A rank that is slow in most windows. Ranks that are slow in turn have both signs.
    is_steady = waited_s[len(waited_s) // 4] > usual_s / 2 > 0
    if not (is_steady and steps.is_long(usual_s)):
        return
    slow = [rank for rank in steps.ranks if waits_s[rank] - waits_s[slowest] < usual_s / 2]
    others = [rank for rank in steps.ranks if rank not in slow]
    own = {phase: spent for phase, spent in steps.spent_s.items() if phase != "communication"}
    others_s = {phase: _median([spent[rank] for rank in others]) for phase, spent in own.items()}
    phase = max(own, key=lambda name: own[name][slowest] - others_s[name])
    if phase == "data":
        return  # `_data` names these ranks
    where = "the rest of the loop" if phase == "other" else phase
    there = f"rank {slowest}" if len(slow) > 1 else "it"
    yield Finding(
        kind="straggler",
        title=f"{name_ranks(slow)} {'are' if len(slow) > 1 else 'is'} slow: the others wait "
        f"{_duration(usual_s)} in each step of {_duration(steps.step_s)} ({where} takes "
        f"{_duration(own[phase][slowest])} on {there}, {_duration(others_s[phase])} on the others)",
        fix=_FIXES[phase],
        share=usual_s / steps.step_s,
    )


def _data(steps: _Steps) -> Iterator[Finding]:
    """Ranks that wait for samples while no slower rank would have held them up anyway."""
    waits_s = steps.spent_s["communication"]
    costs_s = {
        rank: steps.spent_s["data"][rank] - (waits_s[rank] - min(waits_s)) for rank in steps.ranks
    }
    waiting = [rank for rank in steps.ranks if steps.is_long(costs_s[rank])]
    if not waiting:
        return
    share = max(costs_s.values()) / steps.step_s
    where = f" on {name_ranks(waiting, len(steps.ranks))}" if len(steps.ranks) > 1 else ""
    yield Finding(
        kind="data",
        title=f"input-bound: {100 * share:.0f} % of the step waits for data{where}",
        fix=_data_fix(steps.run, len(steps.ranks)),
        share=share,
    )


def _data_fix(run: Mapping[str, Any], num_ranks: int) -> str:
    workers = run.get("workers") or 0
    per_rank = run.get("cores", 1) // run.get("local_world_size", num_ranks)
    option = "DataLoader(..., num_workers=" if run.get("dataloader") else "Batches(..., workers="
    if workers < max(per_rank, 1):
        return f"{option}{max(per_rank, 1)})"
    return (
        f"make the samples cheaper, because {workers} worker{'s' if workers > 1 else ''} of a rank use all "
        f"cores; or {option}{2 * workers}) if the samples wait for files or the network"
    )


def _communication(steps: _Steps) -> Iterator[Finding]:
    """What every rank waits in the same step, with DDP.

    Other strategies wait several times in a step, each time another rank longest, so the least sum of a rank
    is more than the communication. So it is on a host with more ranks than cores: each rank waits for a core.
    """
    run = steps.run
    is_ddp = run.get("strategy") == "DDP" and not run.get("mesh")
    has_cores = run.get("cores", 1) >= run.get("local_world_size", len(steps.ranks))
    if len(steps.ranks) < 2 or not (is_ddp and has_cores):
        return
    exposed_s = _median([window.exposed_s for window in steps.windows])
    if not steps.is_long(exposed_s):
        return
    fix = "a larger global_batch with the same micro_batch, which is another training"
    if not run.get("compress"):
        fix = f'ddp(..., compress="bf16"), which rounds gradients, or {fix}'
    yield Finding(
        kind="communication",
        title=f"communication-bound: each step of {_duration(steps.step_s)} waits "
        f"{_duration(exposed_s)} for communication",
        fix=fix,
        share=exposed_s / steps.step_s,
    )


def _checkpoints(steps: _Steps) -> Iterator[Finding]:
    """Saves that the steps wait for. Sums, not medians: a save is in few of the windows."""
    wall_s = sum(sum(window.wall_s) for window in steps.windows)
    share = sum(sum(window.spent_s["checkpoint"]) for window in steps.windows) / wall_s
    if share >= _LEAST_SHARE:
        yield Finding(
            kind="checkpoint",
            title=f"checkpoints take {100 * share:.0f} % of the time",
            fix=_FIXES["checkpoint"],
            share=share,
        )


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))


def _median_low(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
