"""`Evidence`: a record of the step clock, reduced to one step. The checks in `clock/checks` read it.

It is the seconds that each rank spends in each phase of a step: the median over the windows, so that a pause
in one of them changes nothing. The first window has the warm-up and is left out. Ranks wait for each other
in each step, so a step takes equally long on all of them:

    step = own work of the slowest rank + communication that does not overlap with computation

The time that *every* rank waits is communication. The rank that waits least is the slowest one. What another
rank waits beyond that, it waits for the slowest rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from paceline.clock.record import Record, Window
from paceline.clock.step_clock import PHASES, WAITS

_LEAST_WAIT_S = 1e-3  # per step; less is scheduler noise
_LEAST_WAIT_SHARE = 0.13  # of a step
_LEAST_WINDOWS = 3
_MOST_ROWS = 20_000  # ranks times windows; more take seconds to judge and change nothing


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was measured since the newest start of a run.

    Args:
        windows: All with the same number of ranks, without the first one.
        run: What describes the run; see `Record.run`. A field that an older version did not write is missing.
        spent_s: By phase, the seconds of each rank in one step.
        cpu_s: By rank, seconds of one step in which it used a core, or waited for one, with its loader
            workers; empty if unknown.
        collate_s: By rank, seconds of one step in the collate function; empty if unknown.
        load_s: By rank, seconds of its loader workers for the batches of one step; empty if unknown.
    """

    windows: Sequence[Window]
    run: Mapping[str, Any]
    spent_s: Mapping[str, Sequence[float]]
    cpu_s: Sequence[float]
    collate_s: Sequence[float]
    load_s: Sequence[float]

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(len(self.spent_s["data"]))

    @property
    def step_s(self) -> float:
        """Length of a step."""
        return fmean(sum(spent[r] for spent in self.spent_s.values()) for r in self.ranks)

    @property
    def exposed_s(self) -> float:
        """Communication that every rank waits for."""
        return min(self.spent_s["communication"])

    def own_s(self, rank: int, without: Collection[str] = ()) -> float:
        """The time of a rank's own work in a step: all phases but its waits and `without`."""
        left_out = {*without, *WAITS}
        return sum(spent[rank] for phase, spent in self.spent_s.items() if phase not in left_out)


def collect(record: Record) -> Evidence | None:
    """The evidence of a run; None if its newest start has too few windows."""
    began = record.run.get("step", 0)
    windows = [window for window in record.windows if window.step > began][1:]
    if len(windows) < _LEAST_WINDOWS:
        return None
    num_ranks = windows[-1].num_ranks
    windows = [window for window in windows if window.num_ranks == num_ranks]
    windows = windows[:: math.ceil(len(windows) * num_ranks / _MOST_ROWS)]
    ranks = range(num_ranks)
    cpu_s, collate_s, load_s = [], [], []
    if all(w.cores and w.collate_s for w in windows):
        cpu_s = [
            median(w.cores[rank] * w.wall_s[rank] / w.steps for w in windows) for rank in ranks
        ]
        collate_s = [median(w.collate_s[rank] / w.steps for w in windows) for rank in ranks]
    if all(w.load_s for w in windows):
        load_s = [median(w.load_s[rank] / w.steps for w in windows) for rank in ranks]
    return Evidence(
        windows=windows,
        run=record.run,
        spent_s={
            phase: [median(w.per_step(phase, rank) for w in windows) for rank in ranks]
            for phase in PHASES
        },
        cpu_s=cpu_s,
        collate_s=collate_s,
        load_s=load_s,
    )


def is_long(wait_s: float, step_s: float) -> bool:
    """Whether ranks wait so long in each step of `step_s` that it limits the run."""
    return wait_s >= max(_LEAST_WAIT_S, _LEAST_WAIT_SHARE * step_s)
