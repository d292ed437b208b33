"""`StageRunner`: what the ranks of a pipeline do in a step, and what a call of the model does.

A step (`StageRunner.run`):

1. Find the arguments of the model. The user's loss function is called for each micro-batch; its call of the
   model ends it (`_Captured`).
2. Find the shapes of what stages pass: for new shapes of the arguments, by one forward without gradients
   through all stages.
3. Run a schedule of torch. It decides when this rank computes the forward or backward of which stage and
   micro-batch, and sends and receives tensors. It calls `_Stage` for each forward, and
   `stage_cut.py` computes it. The last stage then calls the loss function again; its call of the model now
   returns the output.

FSDP gathers the parameters of a stage once for a step, and sums its gradients in the last backward.

Outside of a step, a call of the model without gradients runs one forward through all stages, for evaluation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from paceline.clock.step_clock import BACKWARD, FORWARD, clock
from paceline.data.device import copy_tensors, tensors_of
from paceline.errors import StepError, listed
from paceline.job.job import Job
from paceline.parallel.buffers import Buffers
from paceline.parallel.dry_stages import DryStages
from paceline.parallel.loss_graph import discard_gradients, used_leaves
from paceline.parallel.modules import NoOutputOnThisStage, enclosing, whole
from paceline.parallel.pipeline_stages import LOOPED
from paceline.parallel.stage_cut import SENDABLE, Cut
from paceline.parallel.strategy import LossRun

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
_HEAD_SIZE = 2 + 64  # index of a dtype, number of dims, and torch's largest number of dims

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # of a call of the model
# Tensors without memory like the input and the output of each stage of this rank.
_Shapes = Mapping[int, tuple[torch.Tensor, torch.Tensor]]


# A BaseException, so that `except Exception` in a loss function does not catch it.
class _Captured(BaseException):
    """Ends a call of the loss function at its call of the model; holds the model's arguments."""


class Owned(NamedTuple):
    """A parameter or buffer of the whole model; `rank` of the pipeline holds it, or all ranks if None."""

    shape: torch.Size
    dtype: torch.dtype
    rank: int | None


class StageRunner:
    """Runs the stages of a pipeline that are on this rank.

    Attributes:
        group: The ranks that hold the stages of one replica.
        cut: The stages of this rank.
        owners: The parameters and buffers of the whole model by name.
        elsewhere: The names of those that only other ranks hold.
        set_padding: Called before each forward with whether it is that of a padding micro-batch.
        dry_stages: What stages receive in a dry run; None otherwise.
        calls_left: How often the score of an evaluation may still call the model; None outside of one.
    """

    def __init__(self, job: Job, module: nn.Module, stages: list[list[str]], schedule: str) -> None:
        self.group: dist.ProcessGroup = job.device_mesh["pp"].get_group()
        self._rank, self._size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._job, self._module, self.schedule_name = job, module, schedule
        self.device = job.device
        rank_of = {unit: stage % self._size for stage, units in enumerate(stages) for unit in units}
        self.owners = {
            name: Owned(value.shape, value.dtype, rank_of.get(enclosing(name, rank_of)))
            for name, value in module.state_dict().items()
        }
        here = (None, self._rank)
        self.elsewhere = {name for name, owned in self.owners.items() if owned.rank not in here}
        own_stages = list(range(self._rank, len(stages), self._size))
        self.dry_stages = DryStages(job, module, stages, own_stages) if job.is_dry_run else None
        self.cut = Cut(job, module, stages, own_stages)
        self._has_last = self.cut.last_stage in own_stages
        self._schedules: dict[int, _Schedule] = {}  # by numbers of micro-batches
        self._shapes: dict[str, _Shapes] = {}  # by shapes of the arguments
        self.set_padding: Callable[[bool], None] = lambda _: None
        self.calls_left: int | None = None
        # What a call of the model does. "capture": it raises `_Captured`. "output": it returns `_output`.
        # "refuse": an error, because the schedule runs. "all_stages": it runs all stages.
        self._mode: Literal["all_stages", "capture", "output", "refuse"] = "all_stages"
        self._output: Any = None
        module.forward = self._call

    @property
    def is_sharded(self) -> bool:
        """Whether `fsdp` has sharded the stages."""
        return any(isinstance(module, FSDPModule) for module in self.cut.modules.values())

    def compute_in(self, dtype: torch.dtype) -> None:
        """Tell the runner that `fsdp` casts parameters to this dtype."""
        if self.dry_stages is not None:
            self.dry_stages.compute_in(dtype)

    # A step.

    def run(self, step: LossRun, num_micro_batches: int) -> None:
        """Forward and backward of a step's micro-batches."""
        arguments = [self._capture(step, index) for index in range(num_micro_batches)]
        # Here, because forwards come in other numbers on data ranks with other shapes.
        for layer in (layer for module in self.cut.modules.values() for layer in module.modules()):
            if isinstance(layer, FSDPModule):
                layer.unshard(async_op=True)
        self._backwards_left = dict.fromkeys(self.cut.modules, num_micro_batches)
        self._mode = "refuse"
        try:
            shapes = [self._find_shapes(step, *each) for each in enumerate(arguments)]
            compute = partial(self._compute_stage_or_loss, step, arguments, shapes)
            for indices in self._groups(num_micro_batches):
                if len(indices) not in self._schedules:
                    self._schedules[len(indices)] = _Schedule(self, len(indices))
                self._schedules[len(indices)].run(indices, shapes, compute)
        except RuntimeError as error:
            self._reraise(error)
        finally:
            self._mode = "all_stages"

    def begin_backward(self, stage: int) -> None:
        """Have FSDP sum the gradients in a stage's last backward of a step, and free its parameters then."""
        self._backwards_left[stage] -= 1
        module = self.cut.modules[stage]
        if isinstance(module, FSDPModule):
            is_last = self._backwards_left[stage] == 0
            module.set_is_last_backward(is_last)
            module.set_requires_gradient_sync(is_last)
            module.set_reshard_after_backward(is_last)

    def _groups(self, count: int) -> Iterator[range]:
        """The micro-batches of a step, as many as the schedule takes at once."""
        begin = 0
        while begin < count:
            end = count
            if self.schedule_name in LOOPED and count - begin >= 2 * self._size:
                end -= (count - begin) % self._size
            yield range(begin, end)
            begin = end

    def _find_shapes(self, step: LossRun, index: int, arguments: _Arguments) -> _Shapes:
        """Find what this rank's stages receive and send, with one forward of all stages for new shapes."""
        key = repr(_shapes(arguments))
        if key in self._shapes:
            return self._shapes[key]
        found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def compute(stage: int, received: torch.Tensor | None) -> Any:
            output = self._compute_stage(step, index, stage, copy_tensors(arguments), received)
            nothing = torch.empty(0)
            sent = nothing if stage == self.cut.last_stage else output
            found[stage] = _like(nothing if received is None else received), _like(sent)
            return output

        buffers = Buffers([self._module])
        with step.forward_context(index):
            receive = self._receiver(arguments)
        with torch.no_grad():
            self._run_all_stages(compute, receive)
        buffers.restore()
        self._shapes[key] = found
        return found

    def _compute_stage(
        self,
        step: LossRun,
        index: int,
        stage: int,
        arguments: _Arguments,
        received: torch.Tensor | None,
    ) -> Any:
        """A stage of a micro-batch: the tensor to send, or what the model returns."""
        self.set_padding(step.is_padding(index))
        with step.forward_context(index):
            seed_layers = partial(step.seed_layers, index, stage)
            return self.cut.run_stage(stage, *arguments, received, seed_layers)

    def _compute_stage_or_loss(
        self,
        step: LossRun,
        arguments: Sequence[_Arguments],
        shapes: Sequence[_Shapes],
        stage: int,
        index: int,
        received: torch.Tensor,
    ) -> torch.Tensor:
        """Compute one stage of a micro-batch in a schedule: the tensor to send, or the loss at the end."""
        output = self._compute_stage(
            step, index, stage, arguments[index], received if stage else None
        )
        if stage == self.cut.last_stage:
            return self._loss(step, index, output)
        template = shapes[index][stage][1]
        assert isinstance(output, torch.Tensor)
        if (output.shape, output.dtype) != (template.shape, template.dtype):
            raise StepError(
                f"stage {stage} returns a tensor of shape {list(output.shape)} and {output.dtype}; for "
                f"another micro-batch it was {list(template.shape)} and {template.dtype}.",
                where=self._job.where(),
                why="the tensors among the model's arguments have the same shapes in both, so the next "
                "stage expects this one. A number among the arguments seems to decide the shape.",
                fix="cut or pad the tensors before the call of the model.",
            )
        return output

    def _reraise(self, error: BaseException) -> NoReturn:
        """Raise what a stage raised, which torch puts into a RuntimeError, or the failure of a peer."""
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        is_of_torch = frame.f_globals.get("__name__", "").startswith(
            "torch.distributed.pipelining."
        )
        if is_of_torch and isinstance(error.__cause__, Exception):
            raise error.__cause__
        if self.schedule_name == "zero_bubble" and "second time" in str(error):
            raise StepError(
                "schedule='zero_bubble' cannot compute the gradients of this model.",
                where=self._job.where(),
                why="torch computes the gradients of weights apart from those of activations, which fails if "
                "a stage uses a layer twice.",
                fix="use schedule='1f1b' or 'interleaved'.",
            ) from error
        self._job.reraise(error)

    # The loss function of a step.

    def _capture(self, step: LossRun, index: int) -> _Arguments:
        """The arguments with which the loss function calls the model."""
        self._mode = "capture"
        try:
            with step.forward_context(index):
                step.call_loss_function(index)
        except _Captured as captured:
            args, kwargs = captured.args
            return args, kwargs
        finally:
            self._mode = "all_stages"
        raise StepError(
            "the function given to `step.run` did not call the model.",
            where=self._job.where(),
            fix="call model(...) once for each micro-batch.",
        )

    def _loss(self, step: LossRun, index: int, output: Any) -> torch.Tensor:
        """The weighted loss of a micro-batch from the model's output, on the last stage."""
        self._mode, self._output = "output", output
        try:
            with step.forward_context(index):
                result = step.call_loss_function(index)
        finally:
            self._mode, self._output = "refuse", None
        loss, has_gradient = step.weigh(index, result)
        self._refuse_other_uses(loss, tensors_of(output))
        if not has_gradient:
            discard_gradients(loss)
        return loss

    def _refuse_other_uses(self, loss: torch.Tensor, outputs: list[torch.Tensor]) -> None:
        """Refuse a loss that uses parameters otherwise than through the model's outputs."""
        nodes = {output.grad_fn for output in outputs} - {None}
        if not nodes:
            return  # an output of a type in which no tensors are found
        used = set(map(id, used_leaves(loss, excluded=nodes))) - set(map(id, outputs))
        named = self._module.named_parameters() if used else ()
        if names := [name for name, p in named if id(p) in used]:
            raise StepError(
                f"the function given to `step.run` computes with {listed(names)} itself.",
                where=self._job.where(),
                why="the last stage, which computes the loss, has its own parameters only: a penalty on all "
                "parameters would leave out those of other stages.",
                fix="use the optimizer's weight_decay. What needs parameters of the last stage only belongs "
                "into the `forward` of the submodule that holds them.",
            )

    # A call of the model.

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """What the model does in place of its `forward`."""
        if self._mode == "capture":
            raise _Captured(args, kwargs)
        if self._mode == "output":
            self._mode, output = "refuse", self._output
            return output
        self._refuse_call()
        output = self._run_all_stages(
            lambda stage, received: self.cut.run_stage(stage, args, kwargs, received),
            self._receiver((args, kwargs)),
        )
        if self._has_last:
            return output
        raise NoOutputOnThisStage(
            f"rank {self._job.rank} has no output of the model, because it holds stage "
            f"{self.cut.own_stages[-1]}.",
            why=f"the last of the {len(self.cut.stages)} stages has it.",
            fix="use paceline.evaluate, which takes the results of the last stage.",
        )

    def _refuse_call(self) -> None:
        """Raise unless all stages may run one forward now; count it."""
        if self._mode == "refuse":
            raise StepError(
                "the function given to `step.run` called the model twice for one micro-batch.",
                where=self._job.where(),
                why="the last stage cannot run the other stages while the schedule runs them.",
                fix="call the model once, and compute the loss from its output.",
            )
        if torch.is_grad_enabled():
            raise StepError(
                "a pipeline's model was called outside of `step.run`.",
                where=self._job.where(),
                why="its schedule decides when each stage computes.",
                fix="step.run(lambda batch: (loss of model(x) and y, count)), with one call of the model.",
            )
        if self.calls_left == 0:
            raise StepError(
                "the score called the model twice for one batch.",
                where=self._job.where(),
                why="ranks without the last stage cannot follow: for them a score ends at the first call.",
                fix="call the model once, and compute all results from its output.",
            )
        if self.calls_left is not None:
            self.calls_left -= 1

    # One forward through all stages, without a schedule.

    def _run_all_stages(
        self,
        compute: Callable[[int, torch.Tensor | None], Any],
        receive: Callable[[int], torch.Tensor],
    ) -> Any:
        """Call `compute` for each stage in turn; returns what the last stage computes, on its rank only."""
        output = None
        try:
            for stage in self.cut.own_stages:
                output = compute(stage, receive(stage) if stage else None)
                if stage < self.cut.last_stage:
                    self._send(output)
        except RuntimeError as error:
            self._job.reraise(error)
        return output if self._has_last else None

    def _receiver(self, arguments: _Arguments) -> Callable[[int], torch.Tensor]:
        """What gives a stage the tensor from the stage before, in a forward with these arguments."""
        if self.dry_stages is None:
            return lambda _: self._receive()
        args, kwargs = copy_tensors(arguments)
        received = self.dry_stages.receive(args, kwargs)
        return lambda stage: self.cut.sendable(self.cut.stages[stage][0], received[stage])

    def _send(self, x: torch.Tensor) -> None:
        head = [SENDABLE.index(x.dtype), x.dim(), *x.shape]
        head += [0] * (_HEAD_SIZE - len(head))
        target = (self._rank + 1) % self._size
        dist.send(torch.tensor(head, device=x.device), group=self.group, group_dst=target)
        dist.send(x, group=self.group, group_dst=target)

    def _receive(self) -> torch.Tensor:
        device, source = self._job.device, (self._rank - 1) % self._size
        head = torch.empty(_HEAD_SIZE, dtype=torch.int64, device=device)
        dist.recv(head, group=self.group, group_src=source)
        dtype, dims, *shape = head.tolist()
        x = torch.empty(shape[:dims], dtype=SENDABLE[dtype], device=device)
        dist.recv(x, group=self.group, group_src=source)
        return x

    # State.

    def whole_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The state of the whole model, one tensor after the other. All ranks iterate over it."""
        own = self._module.state_dict()
        for name, (shape, dtype, rank) in self.owners.items():
            if name not in self.elsewhere:
                # Other ranks allocate the dtype at the cut; the user may have changed it since.
                value = whole(own[name].detach()).to(dtype).contiguous()
            else:
                value = torch.empty(shape, dtype=dtype, device=self._job.device)
            if rank is not None:
                try:
                    dist.broadcast(value, group=self.group, group_src=rank)
                except RuntimeError as error:
                    self._job.reraise(error)
            yield name, value


class _Schedule:
    """A schedule of torch for `count` micro-batches, with this rank's stages."""

    def __init__(self, runner: StageRunner, count: int) -> None:
        # torch splits a batch into micro-batches. It gets nothing: `forwards` know the arguments.
        self._nothing = torch.empty(count, device=runner.device)
        splits_backward = torch.__version__ >= "2.13" and not runner.is_sharded
        stage_class = _Stage if runner.dry_stages is None else _DryStage
        with _debug_level_off():  # in DETAIL a stage compares shapes with its first
            self._stages = [
                stage_class(
                    # torch would free the gathered parameters of FSDP's modules.
                    nn.Module() if isinstance(module, FSDPModule) else module,
                    stage,
                    len(runner.cut.stages),
                    runner.device,
                    input_args=_like(self._nothing[:1]),
                    output_args=_like(self._nothing[:1]),
                    group=runner.group,
                    dw_builder=None if splits_backward else _whole_backward,
                )
                for stage, module in runner.cut.modules.items()
            ]
        for each in self._stages:
            each.begin_backward = runner.begin_backward
        schedule = SCHEDULES[runner.schedule_name]
        if schedule is Schedule1F1B and count < len(runner.cut.stages):
            schedule = ScheduleGPipe  # needs no more memory here, and torch's 1F1B refuses so few
        self._schedule = schedule(
            self._stages if runner.schedule_name in LOOPED else self._stages[0],
            count,
            loss_fn=lambda loss, _: loss,
            scale_grads=False,
        )

    def run(
        self,
        indices: Sequence[int],
        shapes: Sequence[_Shapes],
        compute: Callable[[int, int, torch.Tensor], torch.Tensor],
    ) -> None:
        """Run forward and backward of these micro-batches; `compute` runs one forward of one stage."""
        for each in self._stages:
            each.shapes = [shapes[index][each.stage_index] for index in indices]
            each.forwards = iter([partial(compute, each.stage_index, index) for index in indices])
        inputs = (self._nothing,) if self._stages[0].is_first else ()
        self._schedule.step(*inputs, target=self._nothing, return_outputs=False)


class _Stage(PipelineStage):
    """A stage whose micro-batches may differ in shape. It tells the clock and FSDP what begins.

    Attributes:
        forwards: The forwards to come. All schedules of torch run those of a stage in the order of the
            micro-batches.
        shapes: What it receives and sends, for each micro-batch.
    """

    begin_backward: Callable[[int], None]
    forwards: Iterator[Callable[[torch.Tensor], torch.Tensor]]
    shapes: Sequence[tuple[torch.Tensor, torch.Tensor]]
    _sent: torch.Tensor | None = None

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        for info in () if self.is_first else self.args_recv_info[fwd_chunk_id]:
            like = self.shapes[fwd_chunk_id][0]
            info.buffer = torch.empty_like(like, device=self.device, requires_grad=True)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        for info in self.grad_recv_info[bwd_chunk_id]:
            info.buffer = torch.empty_like(self.shapes[bwd_chunk_id][1], device=self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_outputs_meta(self) -> tuple[torch.Tensor, ...]:
        """What torch 2.11 compares an output with."""
        return (torch.empty(1, device="meta") if self._sent is None else self._sent,)

    def forward_maybe_with_nosync(self, *args: Any, **_: Any) -> torch.Tensor:
        with _phase(FORWARD):
            output = next(self.forwards)(*args)
        self._sent = output.detach().to("meta")
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.begin_backward(self.stage_index)
        with _phase(BACKWARD):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if not self.is_first and self.bwd_cache[bwd_chunk_id][0] is None:  # a loss without gradient
            like = self.shapes[bwd_chunk_id][0]
            self.bwd_cache[bwd_chunk_id] = (torch.zeros_like(like, device=self.device),)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with _phase(BACKWARD):
            return super().backward_weight_one_chunk(*args, **kwargs)


class _DryStage(_Stage):
    """A stage in a dry run: it receives zeros."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return _with_zeros(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return _with_zeros(super().get_bwd_recv_ops(bwd_chunk_id))

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # torch asks all stages whether they know their shapes, and receives no answer.
        return torch.ones_like(super()._warmup_backward_result(*args, **kwargs))


def _with_zeros(ops: list[dist.P2POp]) -> list[dist.P2POp]:
    for op in ops:
        op.tensor.detach().zero_()
    return ops


@contextlib.contextmanager
def _debug_level_off() -> Iterator[None]:
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.OFF)
    try:
        yield
    finally:
        dist.set_debug_level(level)


@contextlib.contextmanager
def _phase(phase: int) -> Iterator[None]:
    was = clock.begin(phase)
    try:
        yield
    finally:
        clock.end(was)


def _whole_backward() -> Callable[[], None]:
    """A `dw_builder` for zero-bubble schedules: the backward computes all gradients at once.

    torch calls what it returns in place of a later backward of the weights, so nothing is left to do. Needed
    with FSDP, whose hooks run in a whole backward, and before torch 2.13, which adds the gradient of a weight
    too often if a stage uses the weight twice.
    """
    return lambda: None


def _like(x: torch.Tensor) -> torch.Tensor:
    grad = x.is_floating_point()
    return torch.empty(x.shape, dtype=x.dtype, device="meta", requires_grad=grad)


def _shapes(value: Any) -> Any:
    """What decides the shapes that stages pass: shapes and dtypes of nested tensors, strings, flags, types.

    Numbers are left out. A number that differs in each micro-batch, such as a temperature, would need a
    search for each.
    """
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, Mapping):
        return {key: _shapes(each) for key, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _shapes(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, list | tuple):
        return [_shapes(each) for each in value]
    return value if isinstance(value, str | bool | None) else type(value).__name__
