"""The events that a rank records. Each is one line of JSON in the rank's file.

`at` is the line of the user's source that caused an event, such as `train.py:57 in main()`. Digests are
integers; equal values have equal digests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, dataclass_transform

Digests = dict[str, int]  # by the name of a tensor, or of a generator


def _as_json(value: Any) -> Any:
    """A number of NumPy or torch as a number of Python, such as an epoch; other values as text."""
    return value.item() if hasattr(value, "item") and not getattr(value, "ndim", 1) else str(value)


@dataclass_transform(
    kw_only_default=True, frozen_default=True, eq_default=False, field_specifiers=(field,)
)
@dataclass(frozen=True, kw_only=True, eq=False)
class Event:
    """Something that happened in a rank."""

    at: str = ""

    _kinds: ClassVar[dict[str, type[Event]]] = {}

    def __init_subclass__(cls) -> None:
        Event._kinds[cls.__name__] = cls
        dataclass(frozen=True, kw_only=True, eq=False)(cls)  # so a subclass needs no decorator

    def to_json(self) -> str:
        """One line, without the newline."""
        return json.dumps({"event": type(self).__name__, **vars(self)}, default=_as_json)

    @staticmethod
    def from_json(line: str) -> Event:
        """The event of a line; ValueError for half a line, which a killed rank leaves."""
        facts = json.loads(line)
        return Event._kinds[facts.pop("event")](**facts)


class EventInStep(Event):
    """An event with the number of completed optimizer steps."""

    steps_done: int = 0


# The process


class RankStarted(Event):
    """The rank is about to run the script."""

    cores: list[int] = field(default_factory=list)
    cuda_devices: int = 0


class SeedSet(Event):
    """`torch.manual_seed` was called; `at` is empty if a library called it."""


class CompileCalled(Event):
    """`torch.compile` was called."""


class Forked(Event):
    """The script called `os.fork`."""


class OwnRanksStarted(Event):
    """The script starts ranks of its own, with `call`."""

    call: str


class ProcessStarted(Event):
    """The script started a process with `multiprocessing`."""


class TrainingContinues(Event):
    """The script would train on after the wanted steps, or trains in ranks that it starts itself."""


class EndedByVerify(Event):
    """The script was ended here by verify."""


class ExitCalled(Event):
    """`sys.exit(code)` was called, by a module."""

    by: str = ""
    code: Any = None
    in_loop: bool = False  # whether it, or a call that led to it, is in the body of a loop


class Failed(Event):
    """The script failed with an error, or with an exit code."""

    type: str = ""
    message: str = ""
    place: str = ""
    module: str = ""
    code: Any = None


class FileWritten(EventInStep):
    """The script opened a file for writing, saved to it with `torch.save`, or renamed another one to it."""

    path: str
    content: int = 0  # the digest of what `torch.save` got, or of what was renamed; 0 if unknown
    is_whole: bool = False  # whether a rename puts it in place at once, or the script only appends


class FileRead(EventInStep):
    """The script opened a file for reading that was written since verification began."""

    path: str


class OwnFileRead(Event):
    """The script reads a file that an earlier run of verification wrote, such as a checkpoint."""

    path: str


class RankEnded(Event):
    """The process ended; missing after an error, a kill and `os._exit`."""

    # The digests of the buffers, by the number of the model.
    buffers: dict[str, Digests] = field(default_factory=dict)


# The job


class GroupInitialised(Event):
    """`init_process_group` was called, and again when it has returned."""

    backend: str | None = None
    size: int = 0  # the number of ranks; 0 before it has returned


class DDPBuilt(Event):
    """A model was wrapped in DDP."""

    group_size: int = 0  # the number of ranks in its process group


class TensorsSent(Event):
    """The rank sent a tensor to another rank, or received one, for the first time."""


class JoinEntered(Event):
    """DDP's Join was entered."""


class CommHookSet(Event):
    """DDP got a communication hook, which need not take the mean."""


class CollectiveBegun(EventInStep):
    """A collective was entered."""

    op: str
    # The ranks; empty if this rank is not one of them, or no group exists yet.
    group: list[int] = field(default_factory=list)
    reduce: str = ""  # the operation, such as "SUM"
    values: list[float] | None = None  # those of a tensor; None if it is too large to be a metric
    evaluation: int | None = None  # the number of the evaluation; None in training


class CollectiveEnded(Event):
    """The collective returned. `values` are the numbers of a small result; `raised` names the error."""

    values: list[float] | None = None
    raised: str = ""


# The data


class LoaderSeen(Event):
    """The first use of a DataLoader."""

    loader: str  # its name, equal in all runs: the line that used it first
    built: str = ""  # a second name, from the line that built it; for `len(loader)`
    sampler: str = ""  # the name of its type
    sampler_id: int = 0  # equal for loaders of one sampler
    # Those of "num_replicas", "seed", "shuffle", "epoch" and "replacement" that the sampler has.
    sharding: dict[str, Any] = field(default_factory=dict)
    takes_epoch: bool = False  # whether its sampler or dataset has `set_epoch`
    # Whether the sampler has another order after `set_epoch` with another epoch; None if unknown.
    reorders: bool | None = None
    batch_size: int | None = None
    iterable: bool = False
    dataset: str = ""  # the name of its type
    of_library: bool = False  # whether that type is not of the script
    split: int | None = None  # the digest of the indices of a subset
    samples: int | None = None  # the length of the dataset; None if unknown
    root_samples: int | None = None  # the same of the dataset behind all subsets
    batches: int | None = None  # the length of the loader; None if unknown
    persistent: bool = False  # whether its workers keep their copy of the dataset for the next pass


class EventOfPass(EventInStep):
    """An event of a pass over a loader; passes are counted from 0."""

    loader: str
    pass_number: int = 0


class PassBegun(EventOfPass):
    """A pass began. `epoch` is that of its sampler or dataset, as `set_epoch` has set it."""

    epoch: int | None = None


class BatchGiven(EventOfPass):
    """The script got a batch."""

    # The index of each sample in the dataset behind all subsets; None if it has no indices.
    ids: list[Any] | None = None
    size: int | None = None  # the length of the first tensor
    content: int = 0  # the digest of the batch

    @property
    def samples(self) -> int | None:
        """The number of samples; None if unknown."""
        return len(self.ids) if self.ids else self.size


class PassExhausted(EventOfPass):
    """The loader had no more batches."""


class PassStopped(EventOfPass):
    """The script left the pass, or the wanted steps were done, be it on the last batch."""


class PassCut(EventOfPass):
    """The pass was ended early, to see the next one."""


class SamplesLoaded(Event):
    """A rank, or a worker of it, loaded the samples of a batch."""

    loader: str
    worker: int | None = None  # the number of the worker; None for the rank itself
    pass_number: int = 0
    ids: list[Any] | None = None  # as in `BatchGiven`
    contents: list[int] = field(default_factory=list)  # the digest of each sample
    labels: list[int] = field(default_factory=list)  # the digest of its integers and texts
    # The sum of the absolute values of its floats: two processes may differ by rounding.
    magnitudes: list[float] = field(default_factory=list)
    # The digests of the states of the generators: before, and after of those whose state changed.
    random: Digests = field(default_factory=dict)
    drew: Digests = field(default_factory=dict)


# The loop


def full_name(model: int, name: str) -> str:
    """The name of a tensor: `1.weight` in the first model, `model 1: 1.weight` in the second."""
    kind = "untrained model" if model < 0 else "model"
    return f"{kind} {abs(model)}: {name}" if model else name


class ModelSeen(Event):
    """The first call of a model."""

    # Of a model with a DDP inside, the full names of the parameters outside of it.
    outside_ddp: list[str] = field(default_factory=list)
    layout: str = ""  # of its DTensors: "data" for FSDP, "parts" for all others, "" if it has none


class ForwardBegun(EventInStep):
    """The forward of a model began. `sends_buffers`: DDP broadcasts the buffers in it."""

    sends_buffers: bool = False


class ForwardEnded(EventInStep):
    """The forward of a model ended."""

    model: int = 0  # the number of the model; see `Models`
    trains: bool = False  # whether it is in training mode, and gradients are on
    evaluation: int | None = None  # the number of the evaluation; None in training
    sync: bool | None = None  # whether DDP reduces the gradients of this forward; None without DDP
    bypasses_ddp: bool = False  # whether it was called without its DDP, as `model.module(x)`
    samples: int | None = None  # the length of the first tensor; None without one
    # The digest of each of its rows, at most 4096; None without a tensor, or if it was computed with a graph.
    rows: list[int] | None = None
    # The digests of the states of the generators before it.
    random: Digests = field(default_factory=dict)
    drew: list[str] = field(default_factory=list)  # the generators that it drew from
    draws: bool = False  # whether the script drew from torch's generator since the batch
    buffers: Digests = field(default_factory=dict)  # the digests of the buffers
    # The digests of the parameters, in the first forward of training after an update; of a model that is not
    # trained, in its first forward without gradient in an evaluation or step.
    params: Digests | None = None
    devices: list[str] = field(default_factory=list)  # the devices of the parameters, with `params`
    cores: list[int] = field(
        default_factory=list
    )  # the cores that the process may use, with `params`
    visible_devices: str = ""  # the value of CUDA_VISIBLE_DEVICES, with `params`


class BackwardBegun(EventInStep):
    """A backward began."""

    loss: float | None = None  # the loss; None if it is not one number
    sync: list[bool] = field(default_factory=list)  # for each DDP, whether it reduces gradients


class BackwardEnded(Event):
    """The backward returned. `raised` names the error."""

    raised: str = ""


class NumberRead(Event):
    """The script read the value of a tensor with one element in an evaluation, as with `item()`."""

    value: float
    evaluation: int = 0


# The update


class GradientsCleared(Event):
    """`zero_grad` was called."""


class Clipped(Event):
    """Gradients were clipped."""

    norm: float | None = None  # their norm; None if unknown
    max_norm: float | None = None  # the one that they were clipped to; None if unknown
    names: list[str] = field(default_factory=list)  # of their parameters
    scale: float = 1.0  # the loss scale, which they have unless they are unscaled


class Unscaled(Event):
    """The GradScaler unscaled the gradients of these parameters."""

    names: list[str] = field(default_factory=list)


class ScalerStepped(Event):
    """The GradScaler is about to step the optimizer of these parameters."""

    names: list[str] = field(default_factory=list)


class OptimizerStepBegun(Event):
    """An optimizer is about to step."""

    step: int = 0  # the number of the step, from 1
    lrs: list[float] = field(default_factory=list)  # the learning rate of each parameter group
    base: float = 0.0  # the rate that a schedule starts from; 0 without a schedule
    grads: Digests = field(default_factory=dict)  # the digests of the gradients
    state: int = 0  # the digest of the optimizer's state


class OptimizerStepEnded(Event):
    """The optimizer took this step. `params` are the digests of its parameters, without sharded ones."""

    step: int = 0
    params: Digests = field(default_factory=dict)


class ScheduleStepped(EventInStep):
    """A schedule was stepped; `metric` is what ReduceLROnPlateau got."""

    metric: float | None = None


class StateLoaded(Event):
    """A state was loaded into a "model" or an "optimizer"."""

    what: str


class NotReduced(EventInStep):
    """A trained parameter is not reduced by DDP; `frozen`: it was frozen when DDP was built."""

    name: str  # its full name, as in `OptimizerStepBegun.grads`
    frozen: bool = False


# Scripts that use paceline


class Summary(NamedTuple):
    """What is recorded of a tensor."""

    digest: int
    norm: float
    sum: float


class TrainingBuilt(Event):
    """A `Training` was built; they are numbered from 0."""

    training: int = 0
    precision: str = "fp32"
    # "local" if BatchNorm normalises over one rank, "synchronised" if over all, "" without.
    batchnorm: str = ""


class PointEvent(Event):
    """A point of the script at which runs are compared."""


class WeightsAt(PointEvent):
    """The weights of a training after so many of its steps."""

    training: int = 0
    step: int = 0
    params: dict[str, Summary] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # From JSON they come as lists.
        for name in vars(self).keys() & {"params", "buffers", "grads"}:
            summaries = {key: Summary(*each) for key, each in vars(self)[name].items()}
            object.__setattr__(self, name, summaries)


class TrainingStarted(WeightsAt):
    """The first step is about to begin."""


class TrainingStep(WeightsAt):
    """A step ended."""

    ids: list[int] = field(default_factory=list)  # this rank's samples
    loss: float = 0.0  # this rank's sum of losses
    loss_size: float = 0.0  # the sum of the absolute losses of its micro-batches
    count: float = 0.0  # their number
    buffers: dict[str, Summary] = field(default_factory=dict)
    grads: dict[str, Summary] = field(default_factory=dict)  # what the optimizer got


class Evaluated(PointEvent):
    """`evaluate` returned, with these values and this number of samples."""

    samples: int = 0
    values: dict[str, float] = field(default_factory=dict)
