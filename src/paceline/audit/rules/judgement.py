"""What a rule is given, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.audit.evidence import Event, RankLog, Run


@dataclass(frozen=True)
class Case:
    """The runs of one script that a rule may look at.

    Attributes:
        solo: One process.
        ordinary: Several, as the script is.
        replay: Several, given the solo run's batches; None where that could not be done.
        why_no_replay: Why, in words.
    """

    solo: Run
    ordinary: Run
    replay: Run | None = None
    why_no_replay: str = ""

    @property
    def ranks(self) -> list[RankLog]:
        """The ranks of the ordinary run."""
        return self.ordinary.ranks

    @property
    def world_size(self) -> int:
        """Of the ordinary run."""
        return self.ordinary.plan.world_size


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, with its evidence.

    Attributes:
        what: One sentence.
        at: The user's source line.
        ranks: The ranks that do wrong; all where it is the script's.
        step: The first optimizer step, from 1, that it harms; None where it is not one step's.

    Collective: none.
    """

    what: str
    at: str
    ranks: Sequence[int]
    why: str
    fix: str
    evidence: str
    step: int | None = None

    def facts(self) -> dict[str, Any]:
        """For `--json`. Collective: none."""
        return asdict(self) | {"ranks": list(self.ranks)}


@dataclass(frozen=True)
class Sound:
    """The rule looked and found nothing wrong."""

    evidence: str


@dataclass(frozen=True)
class Unknown:
    """The rule could not judge."""

    why: str


Judgement = Fault | Sound | Unknown


@dataclass(frozen=True)
class Rule:
    """One kind of fault."""

    name: str
    judge: Callable[[Case], Judgement]


def outliers(values: Sequence[Any]) -> list[int]:
    """The ranks whose value is not the most frequent one; of two equal camps, not rank 0's."""
    most = max(values, key=lambda value: (values.count(value), value == values[0]))
    return [rank for rank, value in enumerate(values) if value != most]


def windows(log: RankLog) -> list[list[Event]]:
    """A rank's backwards and what follows them up to the next ones, in order: its updates.

    Gradients that were set to zero without an update are in no window.
    """
    found: list[list[Event]] = []
    fresh = True
    for event in log.of("backward", "zero", "scaler-unscale", "clip", "scaler-step", "step"):
        if event["k"] == "zero":
            fresh = True
        elif event["k"] == "backward":
            if fresh or not found or found[-1][-1]["k"] != "backward":
                found.append([])
            fresh = False
            found[-1].append(event)
        elif found:
            found[-1].append(event)
    return found


def updates(log: RankLog) -> list[list[Event]]:
    """What a rank did after each backward that all ranks share: clips, scaler calls, steps.

    Micro-batches under `no_sync` are no such backward.
    """
    found: list[list[Event]] = []
    shared = True
    wrapped = log.first("ddp") is not None
    for event in log.of("forward-end", "backward", "scaler-unscale", "clip", "scaler-step", "step"):
        if event["k"] == "forward-end":
            # Beside DDP, a forward that it knows nothing of is a rank's own affair.
            shared = event["sync"] is True if wrapped else event["sync"] is not False
        elif event["k"] == "backward" and shared:
            found.append([event])
        elif event["k"] != "backward" and found:
            found[-1].append(event)
    return found
