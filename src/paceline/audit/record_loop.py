"""Records the loop: forwards, backwards, whether DDP reduces the gradients, results of evaluations."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from paceline import torch_private
from paceline.audit import replay
from paceline.audit.digests import digest, digest_rows, leaves, numbers_drawn, random_states
from paceline.audit.events import (
    BackwardBegun,
    BackwardEnded,
    CommHookSet,
    DDPBuilt,
    ForwardBegun,
    ForwardEnded,
    NumberRead,
)
from paceline.audit.loss_weight import loss_weight
from paceline.audit.models import Models, buffer_digests, ddp_of, inner_of, parameter_digests
from paceline.audit.progress import Progress
from paceline.audit.record import Nesting, calling_line, intercept, user_line
from paceline.audit.weight_tracer import WeightTracer

# Set before each forward of the solo run and of its replay, so that their dropout is the same.
_FORWARD_SEED = 7_000_003
_MAX_ROWS = 512
_manual_seed = torch.manual_seed  # not the recording one that replaces it


def install(progress: Progress, models: Models, tracer: WeightTracer) -> None:
    """Record forwards and backwards."""
    hooks = _Hooks(progress, models, tracer)
    register_module_forward_pre_hook(hooks.before_forward)
    register_module_forward_hook(hooks.after_forward, with_kwargs=True, always_call=True)
    intercept("__init__", hooks.build_ddp, DistributedDataParallel)
    intercept("register_comm_hook", hooks.register_comm_hook, DistributedDataParallel)
    intercept("backward", hooks.backward, torch.autograd)
    for name in ("item", "__float__", "__int__"):
        intercept(name, hooks.read, torch.Tensor)


class _Hooks:
    def __init__(self, progress: Progress, models: Models, tracer: WeightTracer) -> None:
        self._progress, self._models, self._tracer = progress, models, tracer
        self._pause = ExitStack()
        self._in_transform = torch_private.find("torch._C._are_functorch_transforms_active")
        self._recorder = progress.recorder
        self._building_ddp = Nesting()
        self._in_backward = Nesting()
        self._root: torch.nn.Module | None = None
        self._inner: torch.nn.Module | None = None  # the model inside of it
        self._forward: dict[str, Any] = {}  # the facts of the current forward
        self._forwards = 0
        # By model, the updates before the latest digests; of a model that is not trained, the evaluations.
        self._digested_in: dict[int, int] = {}

    def before_forward(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._root is None and self._is_model(module):
            self._root, self._inner = module, inner_of(module)
            self._pause.enter_context(self._tracer.paused())
            self._begin(module, inputs)
        if self._root is not None and module is self._inner:
            # Inside DDP's forward, after its broadcast of the buffers.
            self._forward["buffers"] = buffer_digests(module)

    def after_forward(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if module is not self._root:
            return
        if "rows" not in self._forward:  # torch gives keyword arguments to this hook only
            self._forward |= _samples(kwargs)
        if self._forward["trains"] and self._forwards == 1:
            self._forward["inputs"] = digest([args, kwargs])
        self._root = None
        self._pause.close()
        drew = [k for k, v in random_states().items() if v != self._forward["random"].get(k)]
        self._recorder.write(ForwardEnded(drew=drew, **self._forward))

    def _is_model(self, module: torch.nn.Module) -> bool:
        if self._in_transform is not None and self._in_transform():
            return False  # the tensors of torch.func have no values
        if self._in_backward.depth:
            return False  # activation checkpointing computes a part of a forward again
        if getattr(module, "is_stage", False):
            return False  # of `paceline.pipeline`, which seeds it; its layers are recorded
        return not self._building_ddp.depth and next(module.parameters(), None) is not None

    def _begin(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        trains = torch.is_grad_enabled() and module.training
        self._progress.on_forward(trains=trains)
        number = self._models.on_call(module, trains=trains)
        wrapper = ddp_of(module)
        of_trained = self._models.is_trained(number)
        if not torch.is_grad_enabled() and self._progress.on_no_grad_forward(of_trained=of_trained):
            replay.keep_or_load_weights(self._progress, self._models)
        drawn_from, self._progress.random_at_batch = self._progress.random_at_batch, None
        draws = None if drawn_from is None else numbers_drawn(drawn_from, torch.get_rng_state())
        if trains and self._sets_seed():
            _manual_seed(_FORWARD_SEED + self._forwards)
        self._forwards += trains
        self._forward = {
            "model": number,
            "at": user_line(),
            "steps_done": self._progress.steps,
            "trains": trains,
            "evaluation": None if torch.is_grad_enabled() else self._progress.evaluation,
            "sync": None if wrapper is None else wrapper.require_backward_grad_sync,
            "bypasses_ddp": wrapper is None and trains and self._models.is_reduced(module),
            "random": random_states(),
            "draws": draws,
            **_samples(inputs),
        }
        if trains and self._digested_in.get(number) != self._progress.updates:
            self._digested_in[number] = self._progress.updates
            self._forward["params"] = parameter_digests(inner_of(module))
            self._forward["devices"] = sorted({str(p.device) for p in module.parameters()})
            self._forward["cores"] = sorted(os.sched_getaffinity(0))
            self._forward["visible_devices"] = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        elif (
            not of_trained
            and self._forward["evaluation"] is not None
            and self._digested_in.get(number) != self._progress.evaluations
        ):
            self._digested_in[number] = self._progress.evaluations
            self._forward["other_params"] = parameter_digests(inner_of(module))
        sends_buffers = wrapper is not None and bool(wrapper.will_sync_module_buffers())  # type: ignore[no-untyped-call]
        self._recorder.write(
            ForwardBegun(
                at=self._forward["at"],
                steps_done=self._progress.steps,
                sends_buffers=sends_buffers,
            )
        )

    def _sets_seed(self) -> bool:
        return self._progress.plan.mode != "ordinary" and not self._progress.ends_by_itself

    def build_ddp(
        self, init: Callable[..., None], model: DistributedDataParallel, *args: Any, **kwargs: Any
    ) -> None:
        with self._building_ddp:
            init(model, *args, **kwargs)
        if not self._models.ddp:
            self._progress.on_first_ddp()
        self._recorder.write(DDPBuilt(at=user_line(), ranks=model.process_group.size()))
        self._models.add_ddp(model)
        self._digested_in.clear()  # it has made the weights equal
        self._tracer.start()

    def register_comm_hook(self, register: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._recorder.write(CommHookSet(at=user_line()))
        register(*args, **kwargs)

    def backward(
        self, backward: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any
    ) -> None:
        with self._in_backward as is_outermost:
            if is_outermost:
                self._record_backward(backward, tensors, *args, **kwargs)
            else:
                backward(tensors, *args, **kwargs)

    def _record_backward(
        self, backward: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any
    ) -> None:
        losses = [t for t in leaves(tensors) if isinstance(t, torch.Tensor)]
        weight = loss_weight(losses[0]) if len(losses) == 1 and losses[0].dim() == 0 else None
        self._progress.on_backward()
        with (
            self._recorder.span(
                BackwardBegun(
                    at=user_line(),
                    steps_done=self._progress.steps,
                    forwards=self._forwards,
                    loaders=sorted(self._progress.loaders_of_step),
                    loss=losses[0].item() if len(losses) == 1 and losses[0].numel() == 1 else None,
                    sync=[model.require_backward_grad_sync for model in self._models.ddp],
                    **asdict(weight) if weight else {},
                ),
                BackwardEnded,
            ) as found,
            self._tracer.paused(),
        ):
            backward(tensors, *args, **kwargs)
            found["shards"] = self._models.norms_of_shards()
        if self._progress.steps == 0 and not self._models.ddp:
            # Before the script itself reduces them over the ranks.
            path = self._progress.plan.folder / f"local-{self._progress.rank}.pt"
            torch.save(self._models.gradients(), path)

    def read(self, read: Callable[..., Any], tensor: torch.Tensor) -> Any:
        value = read(tensor)
        evaluation = self._progress.evaluation
        if evaluation is None or tensor.requires_grad:
            return value
        if isinstance(value, int | float) and (at := calling_line()):
            self._recorder.write(NumberRead(at=at, value=value, evaluation=evaluation))
        return value


def _samples(inputs: Any) -> dict[str, Any]:
    """The number of samples in a forward's inputs and the digest of each, by its first tensor."""
    tensors = [x for x in leaves(inputs) if isinstance(x, torch.Tensor) and x.dim()]
    if not tensors:
        return {"samples": None}
    return {"samples": len(tensors[0]), "rows": digest_rows(tensors[0][:_MAX_ROWS])}
