"""The events that a rank records. Each is one line of JSON in the rank's file.

`at` is the line of the user's source that caused an event, such as `train.py:57 in main()`. Digests are
integers; equal values have equal digests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar, dataclass_transform

Digests = dict[str, int]  # by the name of a tensor


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
        return json.dumps({"event": type(self).__name__, **vars(self)}, default=str)

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

    host: str = ""
    cores: list[int] = field(default_factory=list)
    cuda_devices: int = 0


class SeedSet(Event):
    """`torch.manual_seed` was called."""


class CompileCalled(Event):
    """`torch.compile` was called."""


class Forked(Event):
    """The script called `os.fork`."""


class OwnRanksStarted(Event):
    """The script starts ranks of its own, with `call`."""

    call: str


class TrainsOn(Event):
    """The script would train on after the wanted steps."""


class EndedByVerify(Event):
    """The script was ended after the wanted steps."""


class ExitCalled(Event):
    """`sys.exit(code)` was called, by a module."""

    by: str = ""
    code: Any = None


class Failed(Event):
    """The script failed with an error, or with an exit code."""

    type: str = ""
    message: str = ""
    place: str = ""
    module: str = ""
    code: Any = None


class RankEnded(Event):
    """The process ended; missing after a kill and `os._exit`.

    Attributes:
        buffers: The digests of the buffers, by the number of the model.
        wanted: The steps that the rank was to take.
    """

    buffers: dict[str, Digests] = field(default_factory=dict)
    wanted: int | None = None


# The job


class GroupInitialised(Event):
    """`init_process_group` was called."""

    backend: str | None = None


class DDPBuilt(Event):
    """A model was wrapped in DDP. `ranks`: the size of its process group."""

    ranks: int = 0


class JoinEntered(Event):
    """DDP's Join was entered."""


class CommHookSet(Event):
    """DDP got a communication hook, which need not take the mean."""


class CollectiveBegun(EventInStep):
    """A collective was entered.

    Attributes:
        group: The ranks; empty if this rank is not one of them, or no group exists yet.
        reduce: The operation, such as "SUM".
        shape: The shape of the first tensor.
        items: How many numbers and texts an object has.
        values: The numbers of a small tensor; None if it is too large to be a metric.
        evaluation: The number of the evaluation; None in training.
    """

    op: str
    group: list[int] = field(default_factory=list)
    reduce: str = ""
    shape: list[int] = field(default_factory=list)
    items: int = 0
    values: list[float] | None = None
    evaluation: int | None = None


class CollectiveEnded(Event):
    """The collective returned. `values` are the numbers of a small result; `raised` names the error."""

    values: list[float] | None = None
    raised: str = ""


# The data


class LoaderSeen(Event):
    """The first use of a DataLoader.

    Attributes:
        loader: Its name, equal in all runs.
        sampler, dataset: The names of the types.
        sampler_id: Equal for loaders of one sampler.
        sharding: Attributes of a sampler for several ranks, such as "rank" and "seed".
        takes_epoch: Whether its sampler or dataset has `set_epoch`.
        split: The digest of the indices of a subset.
        samples, root_samples: The length of the dataset, and of the one behind all subsets; None if unknown.
        batches: The length of the loader; None if unknown.
    """

    loader: str
    sampler: str = ""
    sampler_id: int = 0
    sharding: dict[str, Any] = field(default_factory=dict)
    takes_epoch: bool = False
    batch_size: int | None = None
    iterable: bool = False
    dataset: str = ""
    split: int | None = None
    samples: int | None = None
    root_samples: int | None = None
    batches: int | None = None


class EventOfPass(EventInStep):
    """An event of a pass over a loader; passes are counted from 0."""

    loader: str
    pass_number: int = 0


class PassBegun(EventOfPass):
    """A pass began. `epoch` is that of its sampler, if it has one."""

    epoch: int | None = None


class BatchGiven(EventOfPass):
    """The script got a batch.

    Attributes:
        ids: The index of each sample in the dataset behind all subsets; None if it has no indices.
        size: The length of the first tensor.
        content: The digest of the batch.
    """

    ids: list[Any] | None = None
    size: int | None = None
    content: int = 0


class PassExhausted(EventOfPass):
    """The loader had no more batches."""


class PassEndedByVerify(EventOfPass):
    """The wanted steps were done, so the pass was ended."""


class PassLeft(EventOfPass):
    """The script left the pass before its end."""


class PassCut(EventOfPass):
    """The pass was ended early, to see the next one."""


class SamplesLoaded(Event):
    """A rank, or a worker of it, loaded the samples of a batch.

    Attributes:
        worker: The number of the worker; None for the rank itself.
        ids: As in `BatchGiven`.
        contents, labels: The digests of each sample, and of its integers and texts.
        random: The digests of the states of the generators before, by their name.
        drew: The same after it, of those that changed.
    """

    loader: str
    worker: int | None = None
    pass_number: int = 0
    ids: list[Any] | None = None
    contents: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    random: Digests = field(default_factory=dict)
    drew: Digests = field(default_factory=dict)


# The loop


class ModelSeen(Event):
    """The first call of a model.

    Attributes:
        layout: Of its DTensors: "data" for FSDP, "parts" for all others, "" if it has none.
        buffers: The names of its floating-point buffers.
    """

    layout: str = ""
    buffers: list[str] = field(default_factory=list)


class ForwardBegun(EventInStep):
    """The forward of a model began. `sends_buffers`: DDP broadcasts the buffers in it."""

    sends_buffers: bool = False


class ForwardEnded(EventInStep):
    """The forward of a model ended.

    Attributes:
        model: The number of the model; see `Models`.
        trains: Whether it is in training mode, and gradients are on.
        evaluation: The number of the evaluation; None in training.
        sync: Whether DDP reduces the gradients of this forward; None without DDP.
        bypasses_ddp: Whether it was called without its DDP wrapper, as with `model.module(x)`.
        samples: The length of the first tensor; None without one.
        rows: The digest of each of its rows; None without a tensor.
        inputs: The digest of all inputs, in the first forward of training; else None.
        random: The digests of the states of the generators before, by their name.
        drew: The generators that it drew from.
        draws: How many numbers the script drew from torch's generator since the batch; None if unknown.
        buffers: The digests of the buffers.
        params: The digests of the parameters, in the first forward after an update.
        other_params: The same of a model that is not trained, in the first forward of an evaluation.
        devices, cores: Those of the parameters and of the process, with `params`.
        visible_devices: The value of CUDA_VISIBLE_DEVICES, with `params`.
    """

    model: int = 0
    trains: bool = False
    evaluation: int | None = None
    sync: bool | None = None
    bypasses_ddp: bool = False
    samples: int | None = None
    rows: list[int] | None = None
    inputs: int | None = None
    random: Digests = field(default_factory=dict)
    drew: list[str] = field(default_factory=list)
    draws: int | None = None
    buffers: Digests = field(default_factory=dict)
    params: Digests | None = None
    other_params: Digests | None = None
    devices: list[str] = field(default_factory=list)
    cores: list[int] = field(default_factory=list)
    visible_devices: str = ""


class BackwardBegun(EventInStep):
    """A backward began.

    Attributes:
        forwards: How many forwards of training came before it.
        loaders: The loaders that gave a batch since the latest step.
        weight, terms, kind: The loss is the sum of so many terms, each with this weight, by an operation of
            this kind; see `LossWeight`. The number of terms is 0 if they are unknown.
        loss: The loss; None if it is not one number.
        sync: For each DDP, whether it reduces gradients.
    """

    forwards: int = 0
    loaders: list[str] = field(default_factory=list)
    weight: float = 0.0
    terms: float = 0.0
    kind: str = ""
    loss: float | None = None
    sync: list[bool] = field(default_factory=list)

    @property
    def total_weight(self) -> float:
        """The weight of all terms."""
        return self.weight * self.terms


class BackwardEnded(Event):
    """The backward returned. `shards` are the norms of the rank's shards of gradients, by their name."""

    shards: dict[str, float] = field(default_factory=dict)
    raised: str = ""


class NumberRead(Event):
    """The script took the number of a tensor in an evaluation."""

    value: float
    evaluation: int = 0


# The update


class GradientsCleared(Event):
    """`zero_grad` was called."""


class Clipped(Event):
    """Gradients were clipped.

    Attributes:
        norm, max_norm: Their norm, and the one they were clipped to; None if unknown.
        scale: The loss scale that they still had.
    """

    norm: float | None = None
    max_norm: float | None = None
    scale: float = 1.0


class Unscaled(Event):
    """The GradScaler unscaled the gradients."""


class ScalerStepped(Event):
    """The GradScaler is about to step the optimizer."""


class OptimizerStepBegun(Event):
    """An optimizer is about to step.

    Attributes:
        step: The number of the step, from 1.
        lrs: The learning rate of each parameter group.
        base: The rate that a schedule starts from; 0 without a schedule.
        grads, norms: The digests and the norms of the gradients.
        state: The digest of the optimizer's state.
    """

    step: int = 0
    lrs: list[float] = field(default_factory=list)
    base: float = 0.0
    grads: Digests = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    state: int = 0


class OptimizerStepEnded(Event):
    """The optimizer took this step. `params` are the digests of its parameters."""

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

    name: str
    frozen: bool = False


class WeightsChanged(EventInStep):
    """This line changed weights outside of an optimizer."""


# Scripts that use paceline

Summary = list[Any]  # of a tensor: digest, norm, sum


class TrainingBuilt(Event):
    """A `Training` was built; they are numbered from 0.

    Attributes:
        batchnorm: "local" if BatchNorm normalises over one rank, "synchronised" if over all, "" without.
    """

    training: int = 0
    precision: str = "fp32"
    batchnorm: str = ""


class NotBitwise(Event):
    """The reproducible mode refused the training, with this error."""

    what: str
    why: str = ""


class PointEvent(Event):
    """A point of the script at which runs are compared."""


class WeightsAt(PointEvent):
    """The weights of a training after so many of its steps."""

    training: int = 0
    step: int = 0
    params: dict[str, Summary] = field(default_factory=dict)


class TrainingStarted(WeightsAt):
    """The first step is about to begin."""


class TrainingStep(WeightsAt):
    """A step ended.

    Attributes:
        ids: This rank's samples.
        loss, count: This rank's sum of losses, and their number.
        grads: What the optimizer got.
        dropout_off: Whether dropout was turned off.
    """

    epoch: int = 0
    ids: list[int] = field(default_factory=list)
    loss: float = 0.0
    count: float = 0.0
    buffers: dict[str, Summary] = field(default_factory=dict)
    grads: dict[str, Summary] = field(default_factory=dict)
    dropout_off: bool = False


class Evaluated(PointEvent):
    """`evaluate` returned, with these values and this number of samples."""

    samples: int = 0
    values: dict[str, float] = field(default_factory=dict)
