"""What a rank holds of a pipeline: its stages, the forward of each, and torch's schedules that run them.

Every stage calls the model's own `forward`. Submodules of other stages are replaced, under the same names, by
modules without parameters, so parameters keep the names of the whole model.
"""

from __future__ import annotations

import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from paceline import torch_private
from paceline.clock.step_clock import BACKWARD, FORWARD, clock
from paceline.errors import ConfigError, EvaluationError, PacelineError, StepError
from paceline.job.job import Job
from paceline.parallel.modules import OtherStage
from paceline.parallel.pipeline_stages import LOOPED, stateless_layers
from paceline.parallel.strategy import ScheduledStep

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
_MAX_SCHEDULES = 16  # each keeps buffers for the activations of one shape
# Dtypes that stages may send.
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_HEAD_SIZE = 2 + 64  # index of a dtype, number of dims, and torch's largest number of dims


class _NotHere(ConfigError, AttributeError):
    """An attribute of a submodule that another stage holds; `hasattr` must see an AttributeError."""


# Both are BaseExceptions, so that `except Exception` in a model or a loss function does not catch them.
class _Captured(BaseException):
    """Ends a call of the loss function at its call of the model; holds the model's arguments."""


class _StageEnd(BaseException):
    """Ends the model's `forward` where the next stage begins; holds the tensor that is sent."""


class _Proxy(nn.Module):
    """Replaces a submodule: permanently if another stage holds it, else while a stage computes."""

    def __init__(self, pipe: Pipe, name: str, layer: nn.Module | None) -> None:
        super().__init__()
        self._what = pipe, name, layer  # a tuple, so that torch does not register the layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        pipe, name, layer = self._what
        if pipe.running is not None:
            return pipe.running.call(name, layer, args, kwargs)
        if layer is None:
            raise self._missing(f"`{name}` cannot be called")
        # Activation checkpointing computes it again, with the arguments that `forward` gave.
        return layer(*map(_received, args), **{k: _received(v) for k, v in kwargs.items()})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or name == "_what":
                raise
        _, unit, layer = self._what
        if layer is None:
            raise self._missing(f"`{unit}.{name}` cannot be read")
        return getattr(layer, name)

    def _missing(self, what: str) -> _NotHere:
        return _NotHere(
            f"`{self._what[1]}` is on another stage, so {what} on this rank.",
            why="a pipeline calls the model's `forward` on each stage, with its own submodules only.",
            fix="move the computation into a submodule.",
        )


class _StageForward:
    """One forward of a stage through the model's `forward`.

    Submodules of earlier stages return tensors without values. At the first submodule of this stage the
    received tensor takes the place of its first argument. At the first submodule of the next stage the
    forward ends, and its first argument is sent. So `forward` may compute anything between two submodules.
    Submodules without parameters and buffers belong to no stage and compute on all ranks.
    """

    def __init__(self, pipe: Pipe, stage: int, received: torch.Tensor | None) -> None:
        self._pipe = pipe
        self._stage = stage
        self._received = received
        self._has_grad = torch.is_grad_enabled()
        self._num_called = 0
        self.has_begun = stage == 0  # whether values are computed, and not only shapes

    def call(self, unit: str, layer: nn.Module | None, args: Any, kwargs: Any) -> Any:
        """The call of a submodule by `forward`."""
        order, stage_of = self._pipe.order, self._pipe.stage_of
        if unit not in stage_of:
            assert layer is not None
            try:
                return layer(*args, **kwargs)
            except Exception:
                if _is_empty((args, kwargs)):  # of the received shape, which may not fit
                    return self._empty()
                raise
        if unit != self._next:
            raise self._pipe.split_error(f"`forward` calls {unit} where {self._next} was expected")
        stage = stage_of[unit]
        begins = self._num_called > 0 and stage != stage_of[order[self._num_called - 1]]
        self._num_called += 1
        if stage < self._stage:
            return self._empty()
        if begins:
            x = args[0] if args else next(iter(kwargs.values()), None)
            if stage > self._stage:
                raise _StageEnd(x)
            if not _is_empty(x):
                raise self._pipe.split_error(
                    f"the first argument of {unit} is not computed by the stage before"
                )
            if torch.is_grad_enabled() != self._has_grad:
                raise self._pipe.split_error(
                    f"{unit} is computed by torch.utils.checkpoint with use_reentrant=True"
                )
            x.received = self._received  # type: ignore[union-attr]
            self.has_begun = True
            args, kwargs = tuple(map(_received, args)), {k: _received(v) for k, v in kwargs.items()}
        if _is_empty((args, kwargs)):
            raise self._pipe.split_error(
                f"{unit} gets another value than its first argument from an earlier stage"
            )
        assert layer is not None
        return layer(*args, **kwargs)

    @property
    def _next(self) -> str:
        order = self._pipe.order
        return order[self._num_called] if self._num_called < len(order) else "nothing more"

    def _empty(self) -> torch.Tensor:
        """A tensor like the received one, with its device but without values."""
        received = self._received
        assert received is not None
        return torch.empty_like(self._pipe.without_values(received))

    def end(self, output: Any) -> None:
        """Check a forward that returned."""
        if self._num_called < len(self._pipe.order):
            raise self._pipe.split_error(f"`forward` does not call {self._next}")
        if _is_empty(output):
            raise self._pipe.split_error(
                "`forward` returns a tensor that it computes from a value of an earlier stage"
            )


def _received(value: Any) -> Any:
    """The received tensor in place of the tensor without values."""
    return getattr(value, "received", value) if isinstance(value, torch.Tensor) else value


def _is_empty(value: Any) -> bool:
    """Whether a tensor without values is among nested arguments."""
    if isinstance(value, torch.Tensor):
        return value.is_meta or hasattr(value, "fake_mode")
    if isinstance(value, Mapping):
        return any(map(_is_empty, value.values()))
    return isinstance(value, list | tuple) and any(map(_is_empty, value))


class _StageModule(nn.Module):
    """A stage as torch's schedules call it."""

    is_stage = True  # `paceline verify` looks for it

    def __init__(self, units: Sequence[nn.Module], compute: Callable[..., Any]) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)
        self.__dict__["compute"] = compute

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.__dict__["compute"](received)
        return out


class _TimedStage(PipelineStage):
    """Adds up the seconds of its computations."""

    busy_s = 0.0

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(FORWARD, super().forward_one_chunk, args, kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(BACKWARD, super().backward_one_chunk, args, kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(BACKWARD, super().backward_weight_one_chunk, args, kwargs)

    def _timed(self, phase: int, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        began, was = time.perf_counter(), clock.begin(phase)
        try:
            return call(*args, **kwargs)
        finally:
            self.busy_s += time.perf_counter() - began
            clock.end(was)


def _whole_backward() -> Callable[[], None]:
    """For zero-bubble schedules: a backward computes the gradients of weights at once.

    torch before 2.13 counts the gradient of a weight that a stage uses twice too often.
    """
    return lambda: None


class _Schedule:
    """A schedule of torch for a number of micro-batches of one shape, with this rank's stages.

    The last stage returns the loss. Shapes are given, so that torch does not run the model to find them.

    Args:
        examples: For each stage of this rank, tensors like its input and its output, on the meta device.
    """

    def __init__(
        self, pipe: Pipe, size: int, examples: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self._pipe = pipe
        self._run: tuple[ScheduledStep, Sequence[int], Sequence[Any]] | None = None
        self._done: dict[int, int] = {}  # by stage, how many micro-batches had their forward
        self._stages = [
            _TimedStage(
                _StageModule(
                    [pipe.layers[unit] for unit in pipe.units[number]], self._compute_of(number)
                ),
                number,
                len(pipe.units),
                pipe.job.device,
                input_args=examples[number][0],
                output_args=examples[number][1],
                group=pipe.group,
                dw_builder=None if torch.__version__ >= "2.13" else _whole_backward,
            )
            for number in pipe.own
        ]
        kind = SCHEDULES[pipe.schedule]
        if kind is Schedule1F1B and size < len(pipe.units):
            kind = ScheduleGPipe  # needs no more memory here, and torch's 1F1B refuses so few
        stages = self._stages if pipe.schedule in LOOPED else self._stages[0]
        self._schedule = kind(stages, size, loss_fn=lambda loss, _: loss, scale_grads=False)

    def run(self, step: ScheduledStep, micros: Sequence[int], inputs: Sequence[Any]) -> float:
        """Forward and backward of some micro-batches of a step; returns the seconds of computation."""
        self._run, self._done = (step, micros, inputs), dict.fromkeys(self._pipe.own, 0)
        before = sum(stage.busy_s for stage in self._stages)
        numbers = torch.arange(len(micros), device=self._pipe.job.device)
        try:
            self._schedule.step(
                *((numbers,) if self._pipe.is_first else ()), target=numbers, return_outputs=False
            )
        finally:
            self._run = None
        return sum(stage.busy_s for stage in self._stages) - before

    def _compute_of(self, number: int) -> Callable[..., torch.Tensor]:
        def compute(received: torch.Tensor) -> torch.Tensor:
            assert self._run is not None
            step, micros, inputs = self._run
            # All schedules of torch run the forwards of a stage in the order of the micro-batches.
            at = micros[self._done[number]]
            self._done[number] += 1
            output = self._pipe.forward(step, at, number, inputs[at], received if number else None)
            if number == len(self._pipe.units) - 1:
                # float: torch 2.11 compares its dtype with `output_args`. The gradient stays exact.
                output = self._pipe.loss_of(step, at, output).float()
            assert isinstance(output, torch.Tensor)
            return output

        return compute


class Pipe:
    """The stages of one model that this rank holds, and what a call of the model does.

    Attributes:
        units: For each stage of the pipeline, its units; see `pipeline_stages`.
        order: The units of all stages.
        own: The stages of this rank.
        layers: This rank's submodules, by unit, and those that belong to no stage.
        owners: By name of a parameter or buffer of the whole model, its shape, its dtype and the rank of the
            pipeline that holds it; None if all ranks hold it.
        running: The forward of a stage in progress.
        is_running: Whether a step's micro-batches run.
        calls_left: How often the score of an evaluation may still call the model; None outside of one.
    """

    def __init__(self, job: Job, module: nn.Module, units: list[list[str]], schedule: str) -> None:
        self.job, self.module, self.units, self.schedule = job, module, units, schedule
        self.group: dist.ProcessGroup = job.device_mesh["pp"].get_group()
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.own = list(range(self.rank, len(units), self.size))
        self.is_first = 0 in self.own
        self.is_last = len(units) - 1 in self.own
        self.stage_of = {unit: number for number, stage in enumerate(units) for unit in stage}
        self.order = list(self.stage_of)
        self.owners = {
            name: (value.shape, value.dtype, self._owner(name))
            for name, value in module.state_dict().items()
        }
        self.running: _StageForward | None = None
        self.is_running = False
        self._without_values: dict[Any, torch.Tensor] = {}
        self.calls_left: int | None = None
        self.layers: dict[str, nn.Module] = {}
        self._proxies: dict[str, _Proxy] = {}
        self._forward = module.forward
        self._schedules: OrderedDict[tuple[int, str], _Schedule] = OrderedDict()
        self._mode: Literal["", "capture", "output"] = ""
        self._output: Any = None
        for unit in [*self.order, *stateless_layers(module, self.order)]:
            number = self.stage_of.get(unit)
            layer = module.get_submodule(unit) if number is None or number in self.own else None
            self._proxies[unit] = _Proxy(self, unit, layer)
            self._proxies[unit].training = module.get_submodule(unit).training
            if layer is None:
                self._put(unit, self._proxies[unit])
            else:
                self.layers[unit] = layer
        module.forward = self._call

    def _owner(self, name: str) -> int | None:
        unit = next((unit for unit in self.order if name.startswith(f"{unit}.")), None)
        return None if unit is None else self.stage_of[unit] % self.size

    def _put(self, unit: str, layer: nn.Module) -> None:
        parent, _, name = unit.rpartition(".")
        setattr(self.module.get_submodule(parent), name, layer)

    # Computation.

    def forward(
        self, step: ScheduledStep, at: int, number: int, inputs: Any, received: torch.Tensor | None
    ) -> Any:
        """Stage `number` of a micro-batch: the tensor to send, or what the model returns."""
        with step.forward(at, number):
            return self._compute(number, inputs, received)

    def _compute(self, number: int, inputs: Any, received: torch.Tensor | None) -> Any:
        args, kwargs = inputs
        for unit, layer in self.layers.items():
            self._proxies[unit].training = layer.training
            self._put(unit, self._proxies[unit])
        self.running = _StageForward(self, number, received)
        try:
            output = self._forward(*args, **kwargs)
            self.running.end(output)
        except _StageEnd as end:
            output = self._sendable(number, end.args[0])
        except StopIteration as error:
            raise ConfigError(
                f"the `forward` of {type(self.module).__name__} raised StopIteration.",
                where=self.job.where(),
                why="a module that is split has no parameters() during its `forward`, so "
                "`next(self.parameters())` finds none.",
                fix="take the dtype and the device from an argument of `forward`.",
            ) from error
        except Exception as error:
            if self.running.has_begun or isinstance(error, PacelineError):
                raise
            raise self.split_error(
                f"stage {number} cannot skip the computations between the submodules before it: "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            self.running = None
            for unit, layer in self.layers.items():
                self._put(unit, layer)
        return output

    def without_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape, dtype and device without memory."""
        key = tuple(tensor.shape), tensor.dtype, tensor.device
        if key not in self._without_values:
            mode = torch_private.find("torch._subclasses.FakeTensorMode")
            if mode is None:
                made = torch.empty_like(tensor, device="meta")
            else:
                made = mode(allow_non_fake_inputs=True).from_tensor(tensor.detach())
            self._without_values[key] = made
        return self._without_values[key]

    def _sendable(self, number: int, x: Any) -> torch.Tensor:
        if isinstance(x, torch.Tensor) and x.dtype in _DTYPES:
            return x.contiguous()
        shown = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise self.split_error(
            f"the first argument of {self.units[number + 1][0]} is a {shown}, not a floating-point tensor"
        )

    def split_error(self, what: str) -> ConfigError:
        return ConfigError(
            f"{type(self.module).__name__} cannot be split into these stages: {what}.",
            where=self.job.where(),
            why="a stage passes one tensor to the next: the first argument of its first submodule.",
            fix="register submodules in the order of their calls, move computations between them into "
            "submodules, or split at other names.",
        )

    def run(self, step: ScheduledStep) -> tuple[float, float]:
        """Forward and backward of a step's micro-batches; returns the seconds of computation and of all."""
        inputs = [self._capture(step, at) for at in range(step.size)]
        shapes = [repr(_shapes(each)) for each in inputs]
        began, busy_s = time.perf_counter(), 0.0
        self.is_running = True
        try:
            for shape, group in groupby(range(step.size), shapes.__getitem__):
                micros = list(group)
                while micros:
                    size = self._largest(len(micros))
                    schedule = self._schedule_of(size, shape, step, micros[0], inputs)
                    busy_s += schedule.run(step, micros[:size], inputs)
                    micros = micros[size:]
        except RuntimeError as error:
            self._reraise(error)
        finally:
            self.is_running = False
        return busy_s, time.perf_counter() - began

    def _reraise(self, error: BaseException) -> NoReturn:
        """Raise what a stage raised, which torch puts into a RuntimeError, or the failure of a peer."""
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        is_of_torch = frame.f_globals.get("__name__", "").startswith(
            "torch.distributed.pipelining."
        )
        if is_of_torch and isinstance(error.__cause__, Exception):
            raise error.__cause__
        if self.schedule == "zero_bubble" and "second time" in str(error):
            raise StepError(
                "schedule='zero_bubble' cannot compute the gradients of this model.",
                where=self.job.where(),
                why="torch computes the gradients of weights apart from those of activations, which fails if "
                "a stage uses a layer twice.",
                fix="use schedule='1f1b' or 'interleaved'.",
            ) from error
        self.job.reraise(error)

    def _largest(self, number: int) -> int:
        """The largest number of micro-batches, at most `number`, that the schedule takes at once."""
        if self.schedule in LOOPED and number >= 2 * self.size:
            return number // self.size * self.size
        return number

    def _schedule_of(
        self, size: int, shape: str, step: ScheduledStep, at: int, inputs: Sequence[Any]
    ) -> _Schedule:
        key = size, shape
        schedule = self._schedules.get(key)
        if schedule is None:
            schedule = _Schedule(self, size, self._examples(step, at, inputs[at]))
            self._schedules[key] = schedule
            if len(self._schedules) > _MAX_SCHEDULES:
                self._schedules.popitem(last=False)
        self._schedules.move_to_end(key)
        return schedule

    def _examples(
        self, step: ScheduledStep, at: int, inputs: Any
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Tensors like the input and output of this rank's stages, by stage, from a forward of all stages."""
        found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def compute(number: int, received: torch.Tensor | None) -> Any:
            output = self.forward(step, at, number, inputs, received)
            if number == len(self.units) - 1:
                output = torch.empty(())  # the loss
            if received is None:
                received = torch.empty(1, dtype=torch.int64)  # a number of `_Schedule.run`
            found[number] = _like(received), _like(output)
            return output

        buffers = list(self.module.buffers())
        kept = [buffer.clone() for buffer in buffers]
        with torch.no_grad():
            self._pass(compute)
            for buffer, value in zip(buffers, kept, strict=True):
                buffer.copy_(value)
        return found

    def _pass(self, compute: Callable[[int, torch.Tensor | None], Any]) -> Any:
        """One forward without gradients through all stages; the model's output on the last one, else None."""
        last = len(self.units) - 1
        output = None
        try:
            for number in self.own:
                output = compute(number, self._receive() if number else None)
                if number < last:
                    self._send(output)
        except RuntimeError as error:
            self.job.reraise(error)
        return output if self.is_last else None

    def _send(self, x: torch.Tensor) -> None:
        head = [_DTYPES.index(x.dtype), x.dim(), *x.shape]
        head += [0] * (_HEAD_SIZE - len(head))
        target = (self.rank + 1) % self.size
        dist.send(torch.tensor(head, device=x.device), group=self.group, group_dst=target)
        dist.send(x, group=self.group, group_dst=target)

    def _receive(self) -> torch.Tensor:
        device, source = self.job.device, (self.rank - 1) % self.size
        head = torch.empty(_HEAD_SIZE, dtype=torch.int64, device=device)
        dist.recv(head, group=self.group, group_src=source)
        dtype, dims, *shape = head.tolist()
        x = torch.empty(shape[:dims], dtype=_DTYPES[dtype], device=device)
        dist.recv(x, group=self.group, group_src=source)
        return x

    # Calls of the model.

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if self._mode == "capture":
            raise _Captured(args, kwargs)
        if self._mode == "output":
            self._mode, output = "", self._output
            return output
        if self.is_running:
            raise StepError(
                "the function given to `step.run` called the model twice for one micro-batch.",
                where=self.job.where(),
                why="the last stage cannot run the other stages while the schedule runs them.",
                fix="call the model once, and compute the loss from its output.",
            )
        if torch.is_grad_enabled():
            raise StepError(
                "a pipeline's model was called outside of `step.run`.",
                where=self.job.where(),
                why="its schedule decides when each stage computes.",
                fix="step.run(lambda batch: (loss of model(x) and y, count)), with one call of the model.",
            )
        if self.calls_left == 0:
            raise EvaluationError(
                "the score called the model twice for one batch.",
                where=self.job.where(),
                why="ranks without the last stage cannot follow: for them a score ends at the first call.",
                fix="call the model once, and compute all results from its output.",
            )
        if self.calls_left is not None:
            self.calls_left -= 1
        output = self._pass(
            lambda number, received: self._compute(number, (args, kwargs), received)
        )
        if self.is_last:
            return output
        raise OtherStage(
            f"rank {self.job.rank} holds stage {self.own[-1]}, so it has no output of the model.",
            why=f"the last of the {len(self.units)} stages has it.",
            fix="use paceline.evaluate, which takes the results of the last stage.",
        )

    def _capture(self, step: ScheduledStep, at: int) -> tuple[Any, Any]:
        """The arguments with which the loss function calls the model."""
        self._mode = "capture"
        try:
            with step.forward(at, 0):
                step.call(at)
        except _Captured as captured:
            args, kwargs = captured.args
            return args, kwargs
        finally:
            self._mode = ""
        raise StepError(
            "the function given to `step.run` did not call the model.",
            where=self.job.where(),
            fix="call model(...) once for each micro-batch.",
        )

    def loss_of(self, step: ScheduledStep, at: int, output: Any) -> torch.Tensor:
        """The weighted loss of a micro-batch from the model's output, on the last stage."""
        self._mode, self._output = "output", output
        try:
            with step.forward(at, 0):
                result = step.call(at)
        finally:
            self._mode, self._output = "", None
        return step.weigh(at, result)

    # State.

    def others(self) -> set[str]:
        """The names of parameters and buffers that only other ranks hold."""
        return {
            name for name, (_, _, owner) in self.owners.items() if owner not in (None, self.rank)
        }

    def whole_state(self) -> dict[str, torch.Tensor]:
        """The state of the whole model, on the CPU. All ranks call it."""
        own = self.module.state_dict()
        whole: dict[str, torch.Tensor] = {}
        try:
            for name, (shape, dtype, owner) in self.owners.items():
                if owner in (None, self.rank):
                    value = own[name].detach().contiguous()
                else:
                    value = torch.empty(shape, dtype=dtype, device=self.job.device)
                if owner is not None:
                    dist.broadcast(value, group=self.group, group_src=owner)
                whole[name] = value.cpu()
        except RuntimeError as error:
            self.job.reraise(error)
        return whole


def _like(x: torch.Tensor) -> torch.Tensor:
    grad = x.is_floating_point()
    return torch.empty(x.shape, dtype=x.dtype, device="meta", requires_grad=grad)


def _shapes(value: Any) -> Any:
    """Shapes and dtypes of the tensors in nested arguments, and plain values."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, Mapping):
        return {key: _shapes(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_shapes(each) for each in value]
    return value if isinstance(value, int | float | str | None) else type(value).__name__
