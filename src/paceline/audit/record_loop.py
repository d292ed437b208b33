"""Records the loop: forwards, backwards, updates, schedules, loaded states, and results of evaluations."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from paceline import torch_private
from paceline.audit import saved_weights
from paceline.audit.digests import (
    digest,
    digest_rows,
    leaves,
    manual_seed,
    random_states,
    seed_all,
)
from paceline.audit.events import (
    BackwardBegun,
    BackwardEnded,
    Clipped,
    CommHookSet,
    DDPBuilt,
    ForwardBegun,
    ForwardEnded,
    GradientsCleared,
    NumberRead,
    OptimizerStepBegun,
    OptimizerStepEnded,
    ScalerStepped,
    ScheduleStepped,
    StateLoaded,
    Unscaled,
)
from paceline.audit.models import Models, buffer_digests, ddp_of, inner_of, parameter_digests
from paceline.audit.progress import NULL_SEED, Progress
from paceline.audit.record import (
    Nesting,
    calling_frame,
    calling_line,
    intercept,
    user_line,
)
from paceline.audit.union import KeptSteps
from paceline.parallel.modules import owned_parameters

# Set before each forward of training, so that all runs have the same dropout. Not in the ordinary run, nor in
# scripts that use paceline.
_FORWARD_SEED = 7_000_003
_MAX_ROWS = 4096


def install(progress: Progress, models: Models) -> None:
    """Record forwards, backwards and optimizer steps, and the calls around them."""
    hooks = LoopHooks(progress, models)
    register_module_forward_pre_hook(hooks.before_forward)
    register_module_forward_hook(hooks.after_forward, with_kwargs=True, always_call=True)
    intercept("__init__", hooks.build_ddp, DistributedDataParallel)
    intercept("forward", hooks.ddp_forward, DistributedDataParallel)
    intercept("register_comm_hook", hooks.register_comm_hook, DistributedDataParallel)
    intercept("backward", hooks.backward, torch.autograd)
    for name in ("item", "__float__", "__int__"):
        intercept(name, hooks.read_number, torch.Tensor)
    register_optimizer_step_pre_hook(hooks.before_step)
    register_optimizer_step_post_hook(hooks.after_step)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        intercept(name, hooks.clip, clip_grad, torch.nn.utils)
    for name in ("scale", "unscale_", "step"):
        intercept(name, hooks.scaler_method, GradScaler)
    intercept("__init__", hooks.build_schedule, lr_scheduler.LRScheduler)
    for schedule in (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau):
        hooks.watch_schedule(schedule)
    for owner, what in ((torch.nn.Module, "model"), (Optimizer, "optimizer")):
        intercept("load_state_dict", partial(hooks.load, what), owner)
        intercept("zero_grad", hooks.zero_grad, owner)


class LoopHooks:
    """What a rank computes: from the forward of a model to the update of its weights."""

    def __init__(self, progress: Progress, models: Models) -> None:
        self._progress, self._models = progress, models
        self._recorder = progress.recorder
        self._kept = KeptSteps(progress, models)
        self._in_transform = torch_private.find("torch._C._are_functorch_transforms_active")
        self._root: torch.nn.Module | None = None
        self._inner: torch.nn.Module | None = None  # the model inside of it
        self._forward = ForwardEnded()  # the current forward, as far as it is known
        self._wrapped: torch.nn.Module | None = None  # the model of the DDP that is called in it
        self._forwards = 0
        # By model, when it was digested: the updates before, whether it trained, and the evaluation.
        self._digested_in: dict[int, tuple[int, bool, int | None]] = {}
        self._building_ddp = Nesting()
        self._in_backward = Nesting()
        self._has_backward = False  # whether there was one
        self._scaler: GradScaler | None = None
        self._schedules: set[type] = set()  # the classes whose `step` is recorded
        self._in_schedule = Nesting()
        self._loading = Nesting()

    def before_forward(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._root is None and self._is_model(module):
            self._root, self._inner = module, inner_of(module)
            self._begin(module, inputs)
        if self._root is not None:
            self._kept.note_precision(module)
        if self._inner is not None and module in (self._inner, self._wrapped):
            # Inside DDP's forward, after its broadcast of the buffers.
            self._forward = replace(self._forward, buffers=buffer_digests(self._inner))

    def after_forward(self, module: torch.nn.Module, args: Any, *kwargs_output: Any) -> None:
        if module is not self._root:
            return
        self._root = self._inner = self._wrapped = None
        if len(kwargs_output) < 2:
            return  # the forward raised: torch then leaves out the keyword arguments
        forward, kwargs = self._forward, kwargs_output[0]
        if forward.samples is None:  # torch gives keyword arguments to this hook only
            samples, rows = _samples(kwargs)
            forward = replace(forward, samples=samples, rows=rows)
        drew = [k for k, v in random_states().items() if v != forward.random.get(k)]
        self._recorder.write(replace(forward, drew=drew))

    def _is_model(self, module: torch.nn.Module) -> bool:
        if self._in_transform is not None and self._in_transform():
            return False  # the tensors of torch.func have no values
        if self._in_backward.depth:
            return False  # activation checkpointing computes a part of a forward again
        if getattr(module, "is_stage", False):
            return False  # of `paceline.pipeline`, which seeds it; its layers are recorded
        return not self._building_ddp.depth and next(module.parameters(), None) is not None

    def _begin(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        # Of the model itself: Lightning leaves its DDP in the mode of an evaluation.
        trains = torch.is_grad_enabled() and inner_of(module).training
        self._progress.on_forward(trains=trains)
        number = self._models.on_call(module, trains=trains)
        wrapper = ddp_of(module)
        of_trained = self._models.is_trained(module)
        if not torch.is_grad_enabled() and self._progress.on_no_grad_forward(of_trained=of_trained):
            saved_weights.begin_evaluation(self._progress, self._models)
        drawn_from, self._progress.random_at_batch = self._progress.random_at_batch, None
        draws = drawn_from is not None and not torch.equal(drawn_from, torch.get_rng_state())
        self._kept.begin_forward(number, inner_of(module), trains=trains)
        if trains and self._progress.plan.mode != "ordinary" and not self._progress.uses_paceline:
            if self._progress.plan.mode == "null":
                seed_all(NULL_SEED + self._forwards)
            else:
                manual_seed(_FORWARD_SEED + self._forwards)
        self._forwards += trains
        evaluation = None if torch.is_grad_enabled() else self._progress.evaluation
        samples, rows = _samples(inputs)
        forward = ForwardEnded(
            model=number,
            at=user_line(),
            steps_done=self._progress.steps,
            trains=trains,
            evaluation=evaluation,
            bypasses_ddp=trains and self._models.is_reduced(module),  # until a DDP is called
            samples=samples,
            rows=rows,
            random=random_states(),
            draws=draws,
        )
        now = self._progress.optimizer_calls, trains, evaluation
        is_untrained = not of_trained and not torch.is_grad_enabled()
        if (trains or is_untrained) and self._digested_in.get(number) != now:
            self._digested_in[number] = now
            forward = replace(
                forward,
                params=parameter_digests(inner_of(module)),
                devices=sorted({str(p.device) for p in module.parameters()}),
                cores=sorted(os.sched_getaffinity(0)),
                visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            )
        self._forward = forward
        sends_buffers = wrapper is not None and bool(wrapper.will_sync_module_buffers())  # type: ignore[no-untyped-call]
        self._recorder.write(
            ForwardBegun(at=forward.at, steps_done=forward.steps_done, sends_buffers=sends_buffers)
        )

    def build_ddp(
        self, init: Callable[..., None], model: DistributedDataParallel, *args: Any, **kwargs: Any
    ) -> None:
        with self._building_ddp:
            init(model, *args, **kwargs)
        if not self._models.ddp and self._progress.steps:
            self._progress.restart()
            self._models.restart()
            self._forwards = 0
        self._recorder.write(DDPBuilt(at=user_line(), group_size=model.process_group.size()))
        self._models.add_ddp(model)
        self._digested_in.clear()  # it has made the weights equal

    def ddp_forward(
        self, forward: Callable[..., Any], model: DistributedDataParallel, *args: Any, **kwargs: Any
    ) -> Any:
        """Record that a DDP takes part in this forward: itself, or inside of another module."""
        # `model.forward(x)` calls no hooks of the DDP.
        is_root = self._root is None and self._is_model(model)
        if is_root:
            self.before_forward(model, args)
        self._wrapped = model.module
        sync = model.require_backward_grad_sync
        self._forward = replace(self._forward, sync=sync, bypasses_ddp=False)
        result = None
        try:
            result = forward(model, *args, **kwargs)
        finally:
            if is_root:
                self.after_forward(model, args, kwargs, result)
        return result

    def register_comm_hook(self, register: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._recorder.write(CommHookSet(at=user_line()))
        register(*args, **kwargs)

    def backward(
        self, backward: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any
    ) -> None:
        if self._in_backward.depth:
            backward(tensors, *args, **kwargs)
            return
        losses = [t for t in leaves(tensors) if isinstance(t, torch.Tensor)]
        self._has_backward = True
        self._progress.on_backward()
        self._kept.begin_backward(losses)
        with (
            self._in_backward,
            self._recorder.span(
                BackwardBegun(
                    at=user_line(),
                    steps_done=self._progress.steps,
                    loss=losses[0].item() if len(losses) == 1 and losses[0].numel() == 1 else None,
                    sync=[model.require_backward_grad_sync for model in self._models.ddp],
                ),
                BackwardEnded,
            ),
        ):
            backward(tensors, *args, **kwargs)

    def _makes_state(self, optimizer: Optimizer) -> bool:
        """Whether a step only makes the optimizer's state, as in torch's `set_optimizer_state_dict`."""
        return not self._has_backward and all(g.get("lr") == 0 for g in optimizer.param_groups)

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._makes_state(optimizer):
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._record_step(optimizer)
            return None
        is_first = True

        def recorded() -> Any:
            # The closure computes the gradients. L-BFGS calls it several times; the first call counts.
            nonlocal is_first
            loss = closure()
            if is_first:
                is_first = False
                self._record_step(optimizer)
            return loss

        others = {name: value for name, value in kwargs.items() if name != "closure"}
        return (optimizer, recorded, *args[2:]), others

    def _record_step(self, optimizer: Optimizer) -> None:
        owned = owned_parameters(optimizer)
        trained = [(p, p.grad) for p in owned if p.grad is not None]
        self._models.report_unreduced([p for p, _ in trained], self._progress.steps)
        gradients = {self._models.name_of(p): grad for p, grad in trained}
        step = self._progress.step_number(optimizer)
        self._kept.begin_update(step, optimizer)
        self._recorder.write(
            OptimizerStepBegun(
                step=step,
                at=user_line(),
                # Some optimizers choose the rate themselves.
                lrs=[float(group.get("lr") or 0.0) for group in optimizer.param_groups],
                base=float(optimizer.param_groups[0].get("initial_lr", 0.0)),
                grads={name: digest(g) for name, g in gradients.items()},
                state=digest([optimizer.state.get(p, {}) for p in owned]),
            )
        )

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._makes_state(optimizer):
            return
        digests = {
            self._models.name_of(p): digest(p)
            for p in owned_parameters(optimizer)
            if not isinstance(p, DTensor)
        }
        number = self._progress.step_number(optimizer)
        self._recorder.write(OptimizerStepEnded(step=number, params=digests))
        self._progress.on_step(optimizer)

    def clip(self, clip: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        given = inspect.signature(clip).bind(parameters, *args, **kwargs).arguments
        max_norm = float(given["max_norm"]) if "max_norm" in given else None
        if max_norm is not None and math.isinf(max_norm):
            return clip(parameters, *args, **kwargs)  # this call only measures the norm
        self._kept.keep_reduced(parameters)
        result = clip(parameters, *args, **kwargs)
        self._recorder.write(
            Clipped(
                at=user_line(),
                norm=None if result is None else float(result),
                max_norm=max_norm,
                names=[self._models.name_of(p) for p in parameters if p.grad is not None],
                scale=1.0 if self._scaler is None else self._scaler.get_scale(),
            )
        )
        return result

    def scaler_method(
        self, method: Callable[..., Any], scaler: GradScaler, *args: Any, **kwargs: Any
    ) -> Any:
        if not scaler.is_enabled():
            return method(scaler, *args, **kwargs)
        name = method.__name__.strip("_")
        if name == "scale":
            self._scaler = scaler
        elif calling_frame().f_globals.get("__name__") != GradScaler.__module__:
            called = Unscaled if name == "unscale" else ScalerStepped
            optimizer = args[0] if args else kwargs["optimizer"]
            names = [self._models.name_of(p) for p in owned_parameters(optimizer)]
            self._recorder.write(called(at=user_line(), names=names))
        return method(scaler, *args, **kwargs)

    def watch_schedule(self, kind: type) -> None:
        """Record the steps of this class of schedules."""
        if "step" in vars(kind) and kind not in self._schedules:
            self._schedules.add(kind)
            intercept("step", self.step_schedule, kind)

    def build_schedule(
        self, init: Callable[..., None], schedule: Any, *args: Any, **kwargs: Any
    ) -> None:
        for kind in type(schedule).__mro__:
            self.watch_schedule(kind)
        with self._in_schedule:
            init(schedule, *args, **kwargs)  # it calls step()

    def step_schedule(
        self, step: Callable[..., Any], schedule: Any, *args: Any, **kwargs: Any
    ) -> Any:
        with self._in_schedule as is_outermost:
            result = step(schedule, *args, **kwargs)
        if is_outermost:
            metric = None
            if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
                metric = float(next(iter((*args, *kwargs.values()))))
            self._recorder.write(
                ScheduleStepped(at=user_line(), steps_done=self._progress.steps, metric=metric)
            )
        return result

    def zero_grad(self, zero: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._recorder.write(GradientsCleared())
        return zero(*args, **kwargs)

    def load(self, what: str, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._loading as is_outermost:
            result = load(*args, **kwargs)
        if is_outermost:
            self._recorder.write(StateLoaded(at=user_line(), what=what))
        return result

    def read_number(self, read: Callable[..., Any], tensor: torch.Tensor) -> Any:
        value = read(tensor)
        evaluation = self._progress.evaluation
        if evaluation is None or tensor.requires_grad:
            return value
        if isinstance(value, int | float) and (at := calling_line()):
            saved_weights.save_weights(self._progress)
            self._recorder.write(NumberRead(at=at, value=value, evaluation=evaluation))
        return value


def _samples(inputs: Any) -> tuple[int | None, list[int] | None]:
    """The number of samples in a forward's inputs and the digest of each, by its first dense tensor."""
    found = _tensors(inputs)
    first = next((x for x in found if x.layout is torch.strided and not x.is_nested), None)
    if first is None:
        return None, None
    is_computed = first.grad_fn is not None or isinstance(first, torch.nn.Parameter)
    return len(first), None if is_computed else digest_rows(first[:_MAX_ROWS])


def _tensors(inputs: Any) -> list[torch.Tensor]:
    """The tensors with dimensions and data. A number may count the samples of all ranks."""
    found = (x for x in leaves(inputs) if isinstance(x, torch.Tensor) and not x.is_meta)
    return [x for x in found if x.dim()]
