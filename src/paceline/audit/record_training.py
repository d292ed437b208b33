"""Records the calls that change weights: optimizers, clipping, the scaler, schedules, loaded states."""

from __future__ import annotations

import inspect
import math
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from paceline.audit.digests import digest
from paceline.audit.events import (
    Clipped,
    GradientsCleared,
    OptimizerStepBegun,
    OptimizerStepEnded,
    ScalerStepped,
    ScheduleStepped,
    StateLoaded,
    Unscaled,
)
from paceline.audit.models import Models
from paceline.audit.progress import Progress
from paceline.audit.record import Nesting, intercept, user_line
from paceline.audit.weight_tracer import WeightTracer
from paceline.data.digest import plain
from paceline.parallel.modules import owned_parameters


def install(progress: Progress, models: Models, tracer: WeightTracer) -> None:
    """Record optimizer steps and the calls around them."""
    hooks = _Hooks(progress, models, tracer)
    register_optimizer_step_pre_hook(hooks.before_step)
    register_optimizer_step_post_hook(hooks.after_step)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        intercept(name, hooks.clip, clip_grad, torch.nn.utils)
    for name in ("scale", "unscale_", "step", "update"):
        intercept(name, hooks.scaler_method, GradScaler)
    intercept("__init__", hooks.build_optimizer, Optimizer)
    intercept("__init__", hooks.build_schedule, lr_scheduler.LRScheduler)
    for schedule in (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau):
        intercept("step", hooks.step_schedule, schedule)
    for owner, what in ((torch.nn.Module, "model"), (Optimizer, "optimizer")):
        intercept("load_state_dict", partial(hooks.load, what), owner)
        intercept("zero_grad", hooks.zero_grad, owner)


class _Hooks:
    def __init__(self, progress: Progress, models: Models, tracer: WeightTracer) -> None:
        self._progress, self._models, self._tracer = progress, models, tracer
        self._recorder = progress.recorder
        self._scaler: GradScaler | None = None
        self._unscaled: set[int] = set()  # optimizers, since the scaler's last update
        self._building_schedule = Nesting()
        self._loading = Nesting()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._tracer.stop()
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
        self._models.report_unreduced(self._progress.steps)
        gradients = {
            self._models.name_of(p): p.grad
            for p in owned_parameters(optimizer)
            if p.grad is not None
        }
        self._recorder.write(
            OptimizerStepBegun(
                step=self._progress.step_number(optimizer),
                at=user_line(),
                # Some optimizers choose the rate themselves.
                lrs=[float(group.get("lr") or 0.0) for group in optimizer.param_groups],
                base=float(optimizer.param_groups[0].get("initial_lr", 0.0)),
                grads={name: digest(g) for name, g in gradients.items()},
                norms={name: _norm(g) for name, g in gradients.items()},
                state=digest([optimizer.state.get(p, {}) for p in owned_parameters(optimizer)]),
            )
        )
        path = self._progress.plan.folder / "gradients.pt"
        # The first optimizer's; one inside another one has a part of the same gradients.
        if self._progress.rank == 0 and not path.exists():
            torch.save({name: plain(g).cpu() for name, g in gradients.items()}, path)

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        digests = {self._models.name_of(p): digest(p) for p in owned_parameters(optimizer)}
        number = self._progress.step_number(optimizer)
        self._recorder.write(OptimizerStepEnded(step=number, params=digests))
        self._progress.on_step(optimizer)
        self._tracer.start()

    def clip(self, clip: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        result = clip(parameters, *args, **kwargs)
        given = inspect.signature(clip).bind(parameters, *args, **kwargs).arguments
        max_norm = float(given["max_norm"]) if "max_norm" in given else None
        if max_norm is not None and math.isinf(max_norm):
            return result  # this call only measures the norm
        self._recorder.write(
            Clipped(
                at=user_line(),
                norm=None if result is None else float(result),
                max_norm=max_norm,
                scale=self._scale_left({id(p) for p in parameters if p.grad is not None}),
            )
        )
        return result

    def _scale_left(self, parameters: set[int]) -> float:
        """The loss scale that the gradients of these parameters still contain."""
        if self._scaler is None:
            return 1.0
        owned, unscaled = set[int](), set[int]()
        for optimizer in self._optimizers:
            own = {id(p) for p in owned_parameters(optimizer)}
            owned |= own
            if id(optimizer) in self._unscaled:
                unscaled |= own
        clipped = parameters & owned
        if clipped <= unscaled and (clipped or self._unscaled):
            return 1.0
        return self._scaler.get_scale()

    def build_optimizer(
        self, init: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        init(optimizer, *args, **kwargs)
        self._optimizers.add(optimizer)

    def scaler_method(
        self, method: Callable[..., Any], scaler: GradScaler, *args: Any, **kwargs: Any
    ) -> Any:
        if not scaler.is_enabled():
            return method(scaler, *args, **kwargs)
        name = method.__name__.strip("_")
        if name == "scale":
            self._scaler = scaler
        elif name == "update":
            self._unscaled.clear()
        elif sys._getframe(2).f_globals.get("__name__") != GradScaler.__module__:
            called = Unscaled if name == "unscale" else ScalerStepped
            self._recorder.write(called(at=user_line()))
        result = method(scaler, *args, **kwargs)
        if name == "unscale":
            self._unscaled.add(id(args[0] if args else kwargs["optimizer"]))
        return result

    def build_schedule(self, init: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        with self._building_schedule:
            init(*args, **kwargs)  # it calls step()

    def step_schedule(
        self, step: Callable[..., Any], schedule: Any, *args: Any, **kwargs: Any
    ) -> Any:
        result = step(schedule, *args, **kwargs)
        if not self._building_schedule.depth:
            metric = None
            if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
                metric = float(args[0] if args else kwargs["metrics"])
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


def _norm(gradient: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(plain(gradient), dtype=torch.float64))
