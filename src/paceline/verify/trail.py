"""A run of a script that uses paceline, moment by moment. Nothing here judges."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from paceline.audit.evidence import Event, Run

_KINDS = {"paceline-start": "start", "paceline-step": "step", "evaluated": "evaluation"}


@dataclass(frozen=True)
class Moment:
    """The same point of the script on every rank: a training's start, a step of it, or an evaluation.

    Attributes:
        training: Which `Training` of the script, from 0; of an evaluation, the one before it.
        step: How many steps that training had taken.
        ranks: What each rank noted.
    """

    kind: str
    training: int
    step: int
    ranks: list[Event]

    @property
    def ids(self) -> Counter[int]:
        """The samples of a step over all ranks."""
        return Counter(i for event in self.ranks for i in event["ids"])

    @property
    def loss(self) -> float:
        """The mean loss of a step; sums of ranks are added in rank order."""
        total: float = sum(event["loss"] for event in self.ranks)
        return total / (sum(event["count"] for event in self.ranks) or 1)


class Trail:
    """One run as a list of moments."""

    def __init__(self, run: Run) -> None:
        self.count = run.plan.world_size
        self.trainings = run.ranks[0].of("training")
        self.draws = any(
            event["drew"] for log in run.ranks for event in log.of("forward-end") if event["trains"]
        )
        self.moments: list[Moment] = []
        training = step = 0
        for ranks in zip(*(log.of(*_KINDS) for log in run.ranks), strict=False):
            kind = _KINDS[ranks[0]["k"]]
            if kind != "evaluation":
                training, step = ranks[0]["t"], ranks[0].get("s", 0)
            self.moments.append(Moment(kind, training, step, list(ranks)))

    @property
    def steps(self) -> int:
        """How many steps all trainings took."""
        return sum(moment.kind == "step" for moment in self.moments)

    @property
    def evaluations(self) -> int:
        """How many evaluations there were."""
        return sum(moment.kind == "evaluation" for moment in self.moments)
