"""Records the calls that change weights: optimizers, clipping, the scaler, schedules, loaded states."""

from __future__ import annotations

import functools
import inspect
import math
import sys
import weakref
from collections.abc import Callable
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

from paceline.audit.models import Models
from paceline.audit.progress import Progress
from paceline.audit.record import digest, plain, user_line
from paceline.audit.weight_tracer import WeightTracer

_CLIPS = ("clip_grad_norm_", "clip_grad_value_")


def install(progress: Progress, models: Models, tracer: WeightTracer) -> None:
    """Record optimizer steps and the calls around them."""
    hooks = _Hooks(progress, models, tracer)
    register_optimizer_step_pre_hook(hooks.before_step)
    register_optimizer_step_post_hook(hooks.after_step)
    for name in _CLIPS:
        wrapped = hooks.wrap_clip(getattr(clip_grad, name))
        setattr(clip_grad, name, wrapped)
        setattr(torch.nn.utils, name, wrapped)
    for name in ("scale", "unscale_", "step", "update"):
        setattr(GradScaler, name, hooks.wrap_scaler_method(name, getattr(GradScaler, name)))
    Optimizer.__init__ = hooks.wrap_optimizer_init(Optimizer.__init__)  # type: ignore[method-assign]
    schedule: Any = lr_scheduler.LRScheduler
    schedule.__init__ = hooks.wrap_schedule_init(schedule.__init__)
    schedule.step = hooks.wrap_schedule_step(schedule.step)
    kinds: list[tuple[Any, str]] = [(torch.nn.Module, "model"), (Optimizer, "optimizer")]
    for kind, word in kinds:
        kind.load_state_dict = hooks.wrap_load(word, kind.load_state_dict)
        kind.zero_grad = hooks.wrap_zero_grad(kind.zero_grad)


class _Hooks:
    def __init__(self, progress: Progress, models: Models, tracer: WeightTracer) -> None:
        self._progress, self._models, self._tracer = progress, models, tracer
        self._recorder = progress.recorder
        self._scaler: GradScaler | None = None
        self._unscaled: set[int] = set()  # optimizers, since the scaler's last update
        self._is_building_schedule = False
        self._loading = False
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._tracer.stop()
        self._models.report_unreduced()
        gradients = {
            self._models.name_of(p): p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        }
        self._recorder.write(
            "step",
            s=self._progress.number_of(optimizer),
            at=user_line(),
            lrs=[float(group["lr"]) for group in optimizer.param_groups],
            base=float(optimizer.param_groups[0].get("initial_lr", 0.0)),
            grads={name: [digest(g), _norm(g)] for name, g in gradients.items()},
            state=digest(
                [optimizer.state.get(p, {}) for g in optimizer.param_groups for p in g["params"]]
            ),
        )
        if self._progress.steps == 0 and self._progress.rank == 0:
            path = self._progress.plan.folder / f"gradients-{type(optimizer).__name__}.pt"
            torch.save({name: plain(g).cpu() for name, g in gradients.items()}, path)

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        digests = {
            self._models.name_of(p): digest(p)
            for group in optimizer.param_groups
            for p in group["params"]
        }
        number = self._progress.number_of(optimizer)
        self._recorder.write("stepped", s=number, params=digests)
        self._progress.stepped(optimizer)
        self._tracer.start()

    def wrap_clip(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(clip)

        @functools.wraps(clip)
        def watched(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            result = clip(parameters, *args, **kwargs)
            given = signature.bind(parameters, *args, **kwargs).arguments
            if math.isinf(float(given.get("max_norm", 0.0))):
                return result  # this call only measures the norm
            self._recorder.write(
                "clip",
                at=user_line(),
                norm=None if result is None else float(result),
                scale=self._scale_left({id(parameter) for parameter in parameters}),
            )
            return result

        return watched

    def _scale_left(self, parameters: set[int]) -> float:
        """The loss scale that the gradients of these parameters still contain."""
        if self._scaler is None:
            return 1.0
        owners = {
            id(optimizer)
            for optimizer in self._optimizers
            if any(id(p) in parameters for group in optimizer.param_groups for p in group["params"])
        }
        if self._unscaled & (owners or self._unscaled):
            return 1.0
        return self._scaler.get_scale()

    def wrap_optimizer_init(self, init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def watched(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            self._optimizers.add(optimizer)

        return watched

    def wrap_scaler_method(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def watched(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
            if not scaler.is_enabled():
                return method(scaler, *args, **kwargs)
            if name == "scale":
                self._scaler = scaler
            elif name == "update":
                self._unscaled.clear()
            elif sys._getframe(1).f_globals.get("__name__") != GradScaler.__module__:
                self._recorder.write(
                    f"scaler-{name.strip('_')}", at=user_line(), scale=scaler.get_scale()
                )
            result = method(scaler, *args, **kwargs)
            if name == "unscale_":
                self._unscaled.add(id(args[0] if args else kwargs["optimizer"]))
            return result

        return watched

    def wrap_schedule_init(self, init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def watched(*args: Any, **kwargs: Any) -> None:
            outermost, self._is_building_schedule = not self._is_building_schedule, True
            try:
                init(*args, **kwargs)  # it calls step()
            finally:
                self._is_building_schedule = not outermost

        return watched

    def wrap_schedule_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def watched(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            result = step(schedule, *args, **kwargs)
            if not self._is_building_schedule:
                self._recorder.write("schedule", at=user_line())
            return result

        return watched

    def wrap_zero_grad(self, zero: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(zero)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._recorder.write("zero")
            return zero(*args, **kwargs)

        return watched

    def wrap_load(self, word: str, load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def watched(*args: Any, **kwargs: Any) -> Any:
            outermost, self._loading = not self._loading, True
            try:
                result = load(*args, **kwargs)
            finally:
                self._loading = not outermost
            if outermost:
                self._recorder.write("load", at=user_line(), what=word)
            return result

        return watched


def _norm(gradient: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(plain(gradient), dtype=torch.float64))
