"""The plan of one run of the script, and the events that its ranks recorded."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import dropwhile, pairwise, takewhile
from pathlib import Path
from typing import Any, Literal

_VARIABLE = "PACELINE_VERIFY"

# The data that the ranks get:
#   solo        one process with the data of the script; its batches are saved for the replays
#   ordinary    several processes with the data of the script
#   mirrored    a replay: each rank gets the batches of the solo run, so all results must equal those of it
#   divided     a replay: each rank gets a part of each batch of the solo run. It is used if the script
#               divides its batch size by the number of processes
#   evaluated   as ordinary, with the weights of the solo run in each evaluation. It is used if no batches
#               can be replayed; the replays set these weights too
Mode = Literal["solo", "ordinary", "mirrored", "divided", "evaluated"]
REPLAYS = ("mirrored", "divided")

# "k" is the kind of event, "at" the line of the user's source that caused it, and "s" the number of completed
# steps; in "step" and "stepped", "s" is the number of the step itself. Kinds and further entries:
#   start                   host, cores, cuda_devices
#   init, ddp, join         init_process_group (backend), DDP (ranks: how many), the entry of DDP's Join
#   comm-hook               DDP gets a communication hook, which need not take the mean
#   seed                    torch.manual_seed is called
#   compile, fork           torch.compile or os.fork is called
#   spawns                  the script starts ranks of its own: call
#   model                   the first call of a model: buffers (names), layout of its DTensors: "data" for
#                           FSDP, "parts" for all others, empty if it has none
#   loader                  the first use of a DataLoader: loader (its name) and its settings
#   iter, batch, pass-end   a pass over a loader: loader, pass_number, ids and content of each batch
#   pass-left, pass-cut     the script, or the audit, left a pass before its end
#   fetch                   samples are loaded: contents, labels, random (generators before), drew (after)
#   forward, forward-end    model, trains, evaluation, samples, rows, sync (DDP), buffers, params (or
#                           other_params, of a model that is not trained), drew
#   backward, backward-end  forwards, loss, weight (of a sample in it), sync (DDP), loaders (of this step);
#                           after it: shards (the norms of the rank's shards of gradients)
#   collective, collective-end   op, group, reduce, shape, items, values, evaluation
#   read                    the script takes the number of a tensor in an evaluation: at, value, evaluation
#   zero, clip, scaler-unscale, scaler-step   zero_grad, clipping (norm, scale), the GradScaler (scale)
#   step, stepped           before an optimizer step: lrs, base, grads, state; after it: params
#   schedule                a schedule is stepped: metric (of ReduceLROnPlateau)
#   load                    a state is loaded: what
#   unreduced               a trained parameter that DDP does not reduce: name, frozen
#   changed                 this line changed weights outside of an optimizer
#   trains-on               the script would train on after the wanted steps
#   enough                  verification ended the script after the wanted steps
#   exit, failed, end       sys.exit (by: module, code), an error, the end of the process (buffers, wanted)
#   training, paceline-start, paceline-step, evaluated, not-bitwise   of scripts that use paceline: see
#                           `record_paceline`
Event = dict[str, Any]

# Only tensors of up to this many values are metrics; their values are recorded.
MAX_METRIC_VALUES = 16
_REDUCTIONS = ("all_reduce", "reduce", "all_gather", "all_gather_into_tensor")
BUFFER_BROADCAST = "DDP's broadcast of buffers"

_SPANS = ("collective", "backward", "forward")


@dataclass(frozen=True)
class RunPlan:
    """One run of the script.

    Attributes:
        folder: Where its ranks write.
        steps: The optimizer steps to watch.
        solo: The folder of the run whose batches or weights a later run gets.
        bitwise: Whether paceline's reproducible mode is turned on.
        max_steps: If it is more than `steps`, the solo run goes up to it as long as its steps are fast, and
            the other runs take as many steps as the solo run did.
        cut_at: The step after which the solo run cut the first pass over a loader; None if it did not.
    """

    folder: Path
    mode: Mode
    world_size: int
    steps: int
    solo: Path | None = None
    bitwise: bool = False
    max_steps: int = 0
    cut_at: int | None = None

    @property
    def wanted(self) -> int:
        """The steps that each rank should take; the solo run may take more."""
        return self.steps if self.mode == "solo" else max(self.steps, self.max_steps)

    def to_environment(self) -> dict[str, str]:
        """The plan as an environment variable for the ranks."""
        return {_VARIABLE: json.dumps(asdict(self), default=str)}

    @classmethod
    def from_environment(cls) -> RunPlan:
        """The plan of this rank's run; the variable is removed."""
        facts = json.loads(os.environ.pop(_VARIABLE))
        for name in ("folder", "solo"):
            facts[name] = Path(facts[name]) if facts[name] else None
        return cls(**facts)


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
        self._together: list[str] = []  # the loaders of the batches since the latest forward
        self._used = False
        self._times: Counter[str] = Counter()

    def on_batch(self, loader: str) -> None:
        """Note a batch."""
        if self._used:
            self._together, self._used = [], False
        self._together.append(loader)
        self.last = loader

    def on_forward(self) -> None:
        """Note a forward: the batches before it are used."""
        self._used = True

    def on_backward(self) -> None:
        """Note a backward."""
        self._times.update(set(self._together))
        for name in self._together:
            if name == self.last or self._times[name] > 1:
                self.names[name] = None


@dataclass
class Pass:
    """One pass of a rank over a loader.

    Attributes:
        begin: Its "iter" event.
        batches: The "batch" events.
        backwards: For each batch, the backwards between it and the next batch of any loader.
        ended: Whether the loader was exhausted.
    """

    begin: Event
    batches: list[Event] = field(default_factory=list)
    backwards: list[list[Event]] = field(default_factory=list)
    ended: bool = False


@dataclass
class Evaluation:
    """What a rank did between two backwards, from its first forward without gradient on.

    Attributes:
        rows: What was evaluated, by loader and pass: indices, or else contents. A batch that several models
            are given counts once.
        num_samples: The samples before the first collective.
        collectives: The collectives.
        reductions: The calls that reduced small values, with their results.
        numbers: By line, the numbers that the script took; if it gathers, only those after the first gather.
    """

    rows: dict[tuple[str, int], list[Any]] = field(default_factory=dict)
    num_samples: int = 0
    collectives: list[Event] = field(default_factory=list)
    reductions: list[Event] = field(default_factory=list)
    numbers: dict[str, list[float]] = field(default_factory=dict)

    @property
    def gathers(self) -> list[Event]:
        """The collectives that gather."""
        return [event for event in self.collectives if "gather" in event["op"]]


@dataclass(frozen=True)
class RankLog:
    """The events of one rank, in order.

    Attributes:
        fetches: The "fetch" events of the rank and its loader workers.
    """

    rank: int
    events: list[Event]
    fetches: list[Event]

    def of(self, *kinds: str) -> list[Event]:
        """The events of these kinds."""
        return [event for event in self.events if event["k"] in kinds]

    def first(self, kind: str) -> Event | None:
        """The first event of this kind."""
        return next((event for event in self.events if event["k"] == kind), None)

    @property
    def steps(self) -> int:
        """Completed optimizer steps; with several optimizers, rounds of all of them."""
        return max((event["s"] for event in self.of("stepped")), default=0)

    @property
    def ended(self) -> bool:
        """Whether the script reached its end or the limit of steps."""
        return self.first("end") is not None

    @property
    def open_span(self) -> Event | None:
        """The collective, backward or DDP forward that this rank entered and did not leave."""
        inside: list[Event | None] = [None]
        for event in self.of(*_SPANS, *(f"{kind}-end" for kind in _SPANS)):
            if event["k"].endswith("-end"):
                inside.pop()
            elif event["k"] != "forward":
                inside.append(event)
            elif event["sends_buffers"]:
                inside.append({**event, "op": BUFFER_BROADCAST})
            else:
                inside.append(None)  # such a forward waits for no other rank
        return inside[-1]

    @property
    def exchanges_activations(self) -> bool:
        """Whether the script enters collectives inside the forward of a model."""
        events = self.of("forward", "collective", "forward-end")
        return any((a["k"], b["k"]) == ("forward", "collective") for a, b in pairwise(events))

    @property
    def gather_for_loss(self) -> Event | None:
        """The first gather of features for the loss of the first step: it comes before the first backward."""
        before = takewhile(
            lambda e: e["k"] != "backward", self.of("forward", "collective", "backward")
        )
        events = dropwhile(lambda e: e["k"] != "forward", before)
        return next(
            (e for e in events if "gather" in e.get("op", "") and len(e["shape"]) > 1), None
        )

    @property
    def ended_in_step(self) -> bool:
        """Whether verification ended this rank after its last step, and not at the end of a loop."""
        last = self.of("stepped", "iter", "enough")[-2:]
        return [event["k"] for event in last] == ["stepped", "enough"]

    @property
    def training_forwards(self) -> list[Event]:
        """The ends of forwards with gradient of models in training mode, in order."""
        return [event for event in self.of("forward-end") if event["trains"]]

    @property
    def updates(self) -> list[list[Event]]:
        """The events of each update: its backwards, then all other events before the next backward.

        A backward after `zero_grad` begins a new update.
        """
        found: list[list[Event]] = []
        after_zero = True
        for event in self.of("backward", "zero", "scaler-unscale", "clip", "scaler-step", "step"):
            if event["k"] == "zero":
                after_zero = True
            elif event["k"] == "backward":
                if after_zero or not found or found[-1][-1]["k"] != "backward":
                    found.append([])
                after_zero = False
                found[-1].append(event)
            elif found:
                found[-1].append(event)
        return found

    @cached_property
    def loaders(self) -> dict[str, Event]:
        """The descriptions of the loaders, by name."""
        return {event["loader"]: event for event in self.of("loader")}

    @cached_property
    def passes(self) -> dict[tuple[str, int], Pass]:
        """The passes over the loaders, by the loader's name and the number of the pass."""
        found: dict[tuple[str, int], Pass] = {}
        after: list[Event] | None = None
        for event in self.of("iter", "batch", "backward", "pass-end"):
            if event["k"] == "backward":
                if after is not None:
                    after.append(event)
                continue
            own = found.setdefault((event["loader"], event["pass_number"]), Pass(event))
            if event["k"] == "pass-end":
                own.ended = True
            elif event["k"] == "batch":
                after = []
                own.batches.append(event)
                own.backwards.append(after)
        return found

    @cached_property
    def evaluations(self) -> dict[int, Evaluation]:
        """The evaluations, by number."""
        trained = {row for event in self.training_forwards for row in event.get("rows", ())}
        no_batch: Event = {"loader": "", "pass_number": 0, "ids": None}
        batch, model, call, trains = no_batch, None, no_batch, False
        found: defaultdict[int, Evaluation] = defaultdict(Evaluation)
        for event in self.of("batch", "forward-end", "read", "collective", "collective-end"):
            kind, number = event["k"], event.get("evaluation")
            if kind == "batch":
                batch, model = event, None
                trains = event["loader"] in self.training_loaders
            elif kind == "collective-end" and call.get("evaluation") is not None:
                results = event.get("values") or ()
                if call["op"] in _REDUCTIONS and 0 < len(results) <= MAX_METRIC_VALUES:
                    found[call["evaluation"]].reductions.append({**call, "results": results})
            elif kind == "collective":
                call = event
                if number is not None:
                    if "gather" in event["op"] and not found[number].gathers:
                        found[number].numbers.clear()
                    found[number].collectives.append(event)
            elif kind == "read" and number is not None and not trains:
                found[number].numbers.setdefault(event["at"], []).append(event["value"])
            elif kind == "forward-end" and number is not None:
                own, trains = found[number], False
                own.num_samples += 0 if own.collectives else event["samples"] or 0
                rows = event.get("rows", [])
                if rows and batch["loader"] in self.training_loaders:
                    if trained.intersection(rows):
                        continue  # a teacher's forward, or a metric on training samples
                    batch = no_batch
                # Not another model on the same batch, nor the next part of a batch that is given in parts.
                is_again = model is not None and (model != event["model"] or batch["ids"])
                if rows and not (batch["loader"] and is_again):
                    model = event["model"] if batch["loader"] else None
                    key = batch["loader"], batch["pass_number"]
                    own.rows.setdefault(key, []).extend(batch["ids"] or rows)
        return dict(found)

    @cached_property
    def training_batches(self) -> list[Event]:
        """The batches of the loaders whose batches the script trains on."""
        return [event for event in self.of("batch") if event["loader"] in self.training_loaders]

    @cached_property
    def training_loaders(self) -> list[str]:
        """The loaders whose batches the script trains on."""
        found = TrainingLoaders()
        for event in self.of("batch", "forward", "backward"):
            if event["k"] == "batch":
                found.on_batch(event["loader"])
            elif event["k"] == "forward":
                found.on_forward()
            else:
                found.on_backward()
        return list(found.names)


@dataclass(frozen=True)
class Run:
    """One finished run of the script.

    Attributes:
        returncode: The exit code of the launcher.
        output: The end of what the script and the launcher printed.
        hung: Whether it was stopped because no rank made progress.
        out_of_time: Whether it was stopped because it ran longer than `--timeout`.
    """

    plan: RunPlan
    ranks: list[RankLog]
    returncode: int
    output: str = ""
    hung: bool = False
    out_of_time: bool = False

    @property
    def name(self) -> str:
        """The run in words."""
        if self.plan.mode == "solo":
            return "the run of 1 process"
        return f"the {self.plan.mode} run of {self.plan.world_size} processes"

    @property
    def steps(self) -> int:
        """Optimizer steps that every rank took."""
        return min((log.steps for log in self.ranks), default=0)


def read(folder: Path, world_size: int) -> list[RankLog]:
    """The logs of a run's ranks; empty for a rank that wrote nothing."""
    logs = []
    for rank in range(world_size):
        events = list(_events(folder / f"rank{rank}.jsonl"))
        fetches = [event for event in events if event["k"] == "fetch"]
        for path in sorted(folder.glob(f"child{rank}-*.jsonl")):
            for event in _events(path):
                (fetches if event["k"] == "fetch" else events).append(event)
        logs.append(RankLog(rank, events, fetches))
    return _align(logs)


def _align(logs: list[RankLog]) -> list[RankLog]:
    """Count the steps that some ranks took before the first DDP, as to pretrain, on the other ranks too."""
    if not all(log.first("ddp") for log in logs):
        return logs
    before = [list(takewhile(lambda e: e["k"] != "ddp", log.events)) for log in logs]
    alone = [max((e["s"] for e in own if e["k"] == "stepped"), default=0) for own in before]
    aligned = []
    for log, own, steps in zip(logs, before, alone, strict=True):
        after = [
            event | {"s": event["s"] + max(alone) - steps} if "s" in event else event
            for event in log.events[len(own) :]
        ]
        aligned.append(replace(log, events=own + after))
    return aligned


def _events(path: Path) -> Iterator[Event]:
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return  # a killed rank leaves half a line
