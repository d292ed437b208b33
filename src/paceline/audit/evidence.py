"""The events that the ranks of one run recorded, and what they mean: passes, updates, evaluations."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, TypeVar

from paceline.audit.evaluations import Evaluation, EvaluationReader
from paceline.audit.events import (
    BackwardBegun,
    BackwardEnded,
    BatchGiven,
    Clipped,
    CollectiveBegun,
    CollectiveEnded,
    EndedByVerify,
    Event,
    ForwardBegun,
    ForwardEnded,
    GradientsCleared,
    LoaderSeen,
    ModelSeen,
    OptimizerStepBegun,
    OptimizerStepEnded,
    PassBegun,
    PassExhausted,
    RankEnded,
    SamplesLoaded,
    ScalerStepped,
    Unscaled,
)
from paceline.audit.run_plan import RunPlan

E = TypeVar("E", bound=Event)

# What changes gradients and weights after a backward.
UpdateCall = Unscaled | Clipped | ScalerStepped | OptimizerStepBegun

# Where a rank waits for others: a collective of the script, or of DDP in a forward or a backward.
Call = CollectiveBegun | ForwardBegun | BackwardBegun


def op_of(call: Call) -> str:
    """The name of a collective; "" for a backward, which may have none."""
    if isinstance(call, CollectiveBegun):
        return call.op
    return "DDP's broadcast of buffers" if isinstance(call, ForwardBegun) else ""


class TrainingLoaders:
    """Finds the loaders whose batches the script trains on.

    Attributes:
        names: Loaders whose batch was the latest before a backward, and those that twice gave one with it,
            as in `for a, b in zip(one, other)`. A dict, for its order.
        last: The loader of the latest batch.
    """

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.last: str | None = None
        self._unused: list[str] = []  # the loaders of the batches since the latest forward
        self._used = False
        self._times: Counter[str] = Counter()
        # Loaders whose batches are evaluated. If the script leaves such a pass, its latest batch is unused.
        self._evaluated: set[str | None] = set()

    def on_batch(self, loader: str) -> None:
        """Note a batch."""
        if self._used:
            self._unused, self._used = [], False
        self._unused.append(loader)
        self.last = loader

    def on_forward(self) -> None:
        """Note a forward: the batches before it are used."""
        self._used = True

    def on_evaluation(self) -> None:
        """Note a forward of an evaluation."""
        self._evaluated.add(self.last)

    def on_backward(self) -> None:
        """Note a backward."""
        self._times.update(set(self._unused) - self._evaluated)
        for name in self._unused:
            if name == self.last or self._times[name] > 1:
                self.names[name] = None


@dataclass
class Pass:
    """One pass of a rank over a loader."""

    begin: PassBegun
    batches: list[BatchGiven] = field(default_factory=list)
    trains: bool = False  # whether a backward followed a batch, before the next batch of any loader
    ended: bool = False  # whether the loader was exhausted

    @property
    def ids(self) -> list[Any]:
        """The indices of its samples, in order; empty without indices."""
        return [index for batch in self.batches for index in batch.ids or ()]


@dataclass(eq=False)
class Update:
    """The backwards of an update, and what was called after them, before the next backward."""

    backwards: list[BackwardBegun] = field(default_factory=list)
    calls: list[UpdateCall] = field(default_factory=list)

    @property
    def optimizer_step(self) -> OptimizerStepBegun | None:
        """The first step of an optimizer in it; None if the next backward comes before one, as in DP-SGD."""
        return next((call for call in self.calls if isinstance(call, OptimizerStepBegun)), None)

    @property
    def step(self) -> int:
        """The number of its step, from 1. Updates of several optimizers may belong to one step."""
        first = self.optimizer_step
        return self.backwards[0].steps_done + 1 if first is None else first.step


@dataclass(frozen=True)
class RankLog:
    """The events of one rank, in order."""

    rank: int
    events: list[Event]
    fetches: list[SamplesLoaded]  # what the rank and its loader workers loaded

    def of(self, *kinds: type[E]) -> list[E]:
        """The events of these kinds."""
        return [event for event in self.events if isinstance(event, kinds)]

    def first(self, kind: type[E]) -> E | None:
        """The first event of this kind."""
        return next((event for event in self.events if isinstance(event, kind)), None)

    @property
    def steps(self) -> int:
        """Completed optimizer steps; with several optimizers, rounds of all of them."""
        return max((event.step for event in self.of(OptimizerStepEnded)), default=0)

    def optimizer_steps(self, number: int) -> list[OptimizerStepBegun]:
        """The events of step `number`, one of each optimizer."""
        return [event for event in self.of(OptimizerStepBegun) if event.step == number]

    @property
    def ended(self) -> bool:
        """Whether the script reached its end or the limit of steps, or called `sys.exit`."""
        return self.first(RankEnded) is not None

    @property
    def open_span(self) -> Call | None:
        """The collective, backward or DDP forward that this rank entered and did not leave."""
        inside: list[Call | None] = [None]
        for event in self.events:
            if isinstance(event, CollectiveEnded | BackwardEnded | ForwardEnded):
                inside.pop()
            elif isinstance(event, CollectiveBegun | BackwardBegun):
                inside.append(event)
            elif isinstance(event, ForwardBegun):
                # Without buffers to send, a forward waits for no other rank.
                inside.append(event if event.sends_buffers else None)
        return inside[-1]

    @cached_property
    def layouts(self) -> set[str]:
        """The layouts of models whose parameters are DTensors: "data", "parts"."""
        return {event.layout for event in self.of(ModelSeen) if event.layout}

    @property
    def exchanges_activations(self) -> bool:
        """Whether the script enters collectives inside the forward of a model."""
        events: list[Event] = self.of(ForwardBegun, CollectiveBegun, ForwardEnded)
        return any(
            isinstance(a, ForwardBegun) and isinstance(b, CollectiveBegun)
            for a, b in pairwise(events)
        )

    @property
    def exchanges_parts(self) -> bool:
        """Whether the ranks divide a table or experts: they exchange parts before the first backward."""
        calls = (event for event in self.before_backward if isinstance(event, CollectiveBegun))
        return any(call.op.startswith("all_to_all") for call in calls)

    @property
    def ended_in_step(self) -> bool:
        """Whether verification ended this rank after its last step, and not at the end of a loop."""
        last: list[Event] = self.of(OptimizerStepEnded, PassBegun, EndedByVerify)[-2:]
        return [type(event) for event in last] == [OptimizerStepEnded, EndedByVerify]

    @cached_property
    def training_forwards(self) -> list[ForwardEnded]:
        """The forwards with gradient of models in training mode, in order."""
        return [event for event in self.of(ForwardEnded) if event.trains]

    @cached_property
    def models_of_one_batch(self) -> set[int]:
        """The models that are trained on one of several batches only, as the copies of meta-learning."""
        batches: defaultdict[int, set[int]] = defaultdict(set)
        number = 0
        for event in self.events:
            if isinstance(event, BatchGiven):
                number += event.loader in self.training_loaders
            elif isinstance(event, ForwardEnded) and event.trains:
                batches[event.model].add(number)
        return {model for model, own in batches.items() if own != {0} and len(own) == 1 < number}

    @property
    def first_update(self) -> Update:
        """The first update; an empty one if there is none."""
        return next(iter(self.updates), Update())

    @property
    def first_forward(self) -> ForwardEnded:
        """The first forward of training; one without facts if there is none."""
        return next(iter(self.training_forwards), ForwardEnded())

    @property
    def first_backward(self) -> BackwardBegun:
        """The first backward; one without facts if there is none."""
        return self.first(BackwardBegun) or BackwardBegun()

    @cached_property
    def reducing_backwards(self) -> set[BackwardBegun]:
        """The backwards in which DDP reduces: the first after each forward of training outside of `no_sync`.

        A model without DDP may be called between the two.
        """
        found: set[BackwardBegun] = set()
        reduces = False
        for event in self.events:
            if isinstance(event, ForwardEnded) and event.trains and event.sync is not None:
                reduces = event.sync
            elif isinstance(event, BackwardBegun) and reduces:
                found.add(event)
                reduces = False
        return found

    @cached_property
    def before_backward(self) -> list[Event]:
        """The events before the first backward."""
        return list(takewhile(lambda event: not isinstance(event, BackwardBegun), self.events))

    @cached_property
    def updates(self) -> list[Update]:
        """The updates. A backward after `zero_grad`, or after a clipping or a step, begins a new one."""
        found: list[Update] = []
        after_zero = True
        for event in self.events:
            if isinstance(event, GradientsCleared):
                after_zero = True
            elif isinstance(event, BackwardBegun):
                if after_zero or not found or found[-1].calls:
                    found.append(Update())
                after_zero = False
                found[-1].backwards.append(event)
            elif found and isinstance(event, UpdateCall):
                found[-1].calls.append(event)
        return found

    @cached_property
    def loaders(self) -> dict[str, LoaderSeen]:
        """The descriptions of the loaders, by name."""
        return {event.loader: event for event in self.of(LoaderSeen)}

    @cached_property
    def passes(self) -> dict[tuple[str, int], Pass]:
        """The passes over the loaders, by the loader's name and the number of the pass."""
        found: dict[tuple[str, int], Pass] = {}
        latest: Pass | None = None  # the pass of the latest batch
        for event in self.events:
            if isinstance(event, BackwardBegun) and latest is not None:
                latest.trains = True
            elif isinstance(event, PassBegun):
                found[event.loader, event.pass_number] = Pass(event)
            elif not isinstance(event, PassExhausted | BatchGiven):
                continue
            elif (own := found.get((event.loader, event.pass_number))) is None:
                continue  # it began before the first DDP
            elif isinstance(event, PassExhausted):
                own.ended = True
            else:
                own.batches.append(event)
                latest = own
        return found

    @cached_property
    def evaluations(self) -> dict[int, Evaluation]:
        """The evaluations, by number."""
        return EvaluationReader(self.training_loaders).read(self.events)

    @cached_property
    def training_batches(self) -> list[BatchGiven]:
        """The batches of the loaders whose batches the script trains on."""
        return [event for event in self.of(BatchGiven) if event.loader in self.training_loaders]

    @cached_property
    def training_loaders(self) -> list[str]:
        """The loaders whose batches the script trains on."""
        found = TrainingLoaders()
        for event in self.events:
            if isinstance(event, BatchGiven):
                found.on_batch(event.loader)
            elif isinstance(event, ForwardBegun):
                found.on_forward()
            elif isinstance(event, ForwardEnded) and event.evaluation is not None:
                found.on_evaluation()
            elif isinstance(event, BackwardBegun):
                found.on_backward()
        return list(found.names)

    @cached_property
    def trains_together(self) -> bool:
        """Whether a model is in shards, or an exchange was seen: by DDP, or in a call after a backward."""
        return (
            bool(self.layouts)
            or any(event.sync for event in self.training_forwards)
            or self.exchanges_after_backward
            or self.exchanges_in_optimizer
        )

    @property
    def exchanges_after_backward(self) -> bool:
        """Whether a collective is entered in a backward, or between it and the step of an optimizer."""
        calls: list[Event] = self.of(BackwardBegun, CollectiveBegun, OptimizerStepBegun)
        return any(
            isinstance(a, BackwardBegun) and isinstance(b, CollectiveBegun)
            for a, b in pairwise(calls)
        )

    @property
    def exchanges_in_optimizer(self) -> bool:
        """Whether a collective is entered inside the step of an optimizer."""
        inside = False
        for event in self.of(OptimizerStepBegun, OptimizerStepEnded, CollectiveBegun):
            if inside and isinstance(event, CollectiveBegun):
                return True
            inside = isinstance(event, OptimizerStepBegun)
        return False


@dataclass(frozen=True)
class Run:
    """One finished run of the script."""

    plan: RunPlan
    ranks: list[RankLog]
    returncode: int  # the exit code of the rank that failed first, else 0
    output: str = ""  # the end of what the ranks printed
    hung: bool = False  # whether it was stopped because no rank made progress
    out_of_time: bool = False  # whether it was stopped because it ran longer than `--timeout`

    @property
    def name(self) -> str:
        """The run in words."""
        if self.plan.mode == "solo":
            return "the run of 1 process"
        count = self.plan.world_size
        return f"the {self.plan.mode} run of {count} process{'es' * (count > 1)}"

    @property
    def steps(self) -> int:
        """Optimizer steps that every rank took."""
        return min((log.steps for log in self.ranks), default=0)


def read_logs(folder: Path, world_size: int) -> list[RankLog]:
    """The logs of a run's ranks; empty for a rank that wrote nothing."""
    logs = []
    for rank in range(world_size):
        events = list(_events(folder / f"rank{rank}.jsonl"))
        fetches = [event for event in events if isinstance(event, SamplesLoaded)]
        for path in sorted(folder.glob(f"child{rank}-*.jsonl")):
            for event in _events(path):
                if isinstance(event, SamplesLoaded):
                    fetches.append(event)
                else:
                    events.append(event)
        logs.append(RankLog(rank, events, fetches))
    return logs


def _events(path: Path) -> Iterator[Event]:
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield Event.from_json(line)
        except ValueError:
            return  # a killed rank leaves half a line
