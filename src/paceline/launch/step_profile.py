"""`paceline run --profile-steps`: where the time of a script's steps goes, from samples of its stacks.

The script need not import paceline. While it trains, each rank samples the stack of its main thread
(watch/sampling.py) for a second at a time; at the end this node prints the shares of its ranks.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from paceline.clock.shares import judge_shares
from paceline.launch.local_ranks import Question, Rank
from paceline.watch.rank_state import read_place
from paceline.watch.sampling import GARBAGE, NO_PHASE, PHASES, WAITING

REQUEST = "phases"
_SECONDS = 1.0  # of one request
_ANSWER_S = 2.0  # for the answers; a rank may be in native code that holds the GIL
_TRAINS = ("backward", "optimizer")  # phases that only a training has
_COLUMNS = 8  # ranks; of more, the smallest, the median and the largest share are shown

# By (phase, place of the script): seconds.
Spent = dict[tuple[str, str], float]


class StepProfile:
    """Asks the ranks of this node again and again how their time passes, and adds the answers up.

    Files under `cwd` become relative in the report.
    """

    def __init__(self, cwd: str) -> None:
        self._cwd = cwd
        self._question: Question | None = None
        self._spent: dict[int, Spent] = defaultdict(lambda: defaultdict(float))

    def check(self, now: float, alive: Sequence[Rank]) -> None:
        """Handle answers, and ask again.

        Args:
            now: Monotonic, in seconds.
            alive: The ranks of this node that still run.
        """
        answers = {}
        if self._question is not None:
            if self._question.is_open(now):
                return
            # Without "spent", an answer is an error.
            answers = {rank: each.get("spent", ()) for rank, each in self._question.answers.items()}
        # Before and after the training, ranks import, load and evaluate.
        if any(phase in _TRAINS for spent in answers.values() for phase, _, _ in spent):
            begin_s = 0.0 if self._spent else min(map(_first_s, answers.values()))
            for rank, spent in answers.items():
                passed_s = 0.0
                for phase, place, seconds in spent:
                    if passed_s >= begin_s:
                        self._spent[rank][phase, place] += seconds
                    passed_s += seconds
        within_s = _SECONDS + _ANSWER_S
        self._question = Question(alive, REQUEST, now=now, within_s=within_s, seconds=_SECONDS)

    def report(self) -> str:
        """The shares of the phases on each rank, as text."""
        return describe(self._spent, self._cwd)


def _first_s(spent: Sequence[tuple[str, str, float]]) -> float:
    """Seconds until the first sample of a training."""
    passed_s = 0.0
    for phase, _, seconds in spent:
        if phase in _TRAINS:
            return passed_s
        passed_s += seconds
    return math.inf


def describe(spent: Mapping[int, Spent], cwd: str) -> str:
    """A table of phases and ranks, with the line of the script that took most of each phase."""
    if not spent:
        return "--profile-steps saw no training: no backward and no step of an optimizer ran for a second."
    ranks = sorted(spent)
    total_s = {rank: sum(spent[rank].values()) for rank in ranks}
    shares: dict[str, list[float]] = {}
    for phase in (*PHASES, WAITING, GARBAGE, NO_PHASE):
        own = [_seconds(spent[rank], phase) / total_s[rank] for rank in ranks]
        if max(own) >= 0.005:
            shares[phase] = own
    few = len(ranks) <= _COLUMNS
    heads = [f"rank {rank}" for rank in ranks] if few else ["least", "median", "most"]
    lines = [
        f"the time of the steps, from samples of the stacks during {max(total_s.values()):.0f} s:",
        f"  {'':18}{''.join(f'{head:>9}' for head in heads)}  most of it at",
    ]
    for phase, own in shares.items():
        values = own if few else [min(own), statistics.median(own), max(own)]
        columns = "".join(f"{value:>8.0%}".replace("%", " %") for value in values)
        lines.append(
            f"  {_TITLES.get(phase, phase):18}{columns}  {_place(spent, phase, cwd)}".rstrip()
        )
    mean = {phase: statistics.fmean(own) for phase, own in shares.items()}
    lines += [f"  {finding.title}: {finding.cure}." for finding in judge_shares(mean)]
    return "\n".join(lines)


_TITLES = {WAITING: "waiting for ranks", NO_PHASE: "other code"}


def _seconds(spent: Spent, phase: str) -> float:
    return sum(seconds for (name, _), seconds in spent.items() if name == phase)


def _place(spent: Mapping[int, Spent], phase: str, cwd: str) -> str:
    places: dict[str, float] = defaultdict(float)
    for own in spent.values():
        for (name, place), seconds in own.items():
            if name == phase and place:
                places[place] += seconds
    return read_place(max(places, key=places.__getitem__), cwd).line if places else ""
