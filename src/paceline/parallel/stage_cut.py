"""`Cut`: a model cut into stages, and the forward of one stage.

A model with

    def forward(self, ids):
        mask = ids != 0
        x = self.embedding(ids)
        x = self.block1(x, mask) * 2
        x = self.block2(x, mask)
        return self.head(x)

is cut into the stages [embedding, block1] and [block2, head]. On each rank the layers of other ranks become
`Skipped` modules once, under the same names, and their memory is freed. Each stage calls `forward(ids)`:

- On stage 0, the call of `block2` ends it (`_StageEnd`); its first argument is sent.
- On stage 1, `embedding` and `block1` return placeholders; operations on placeholders give placeholders.
  `mask` is computed again. At the call of `block2` the received tensor takes the place of the placeholder.

A unit is the name of a submodule that belongs to one stage as a whole (see `pipeline_stages`). Submodules
without parameters and buffers belong to no stage and compute on all ranks.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from paceline.data.device import copy_tensors
from paceline.errors import ConfigError, PacelineError
from paceline.job.job import Job

# Dtypes of tensors that stages may send.
SENDABLE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

# Properties and methods of a placeholder that do not depend on values.
_FACTS = {
    "shape",
    "dtype",
    "device",
    "ndim",
    "layout",
    "requires_grad",
    "is_cuda",
    "is_cpu",
    "is_meta",
}
_FACTS |= {
    "size",
    "dim",
    "numel",
    "stride",
    "get_device",
    "is_floating_point",
    "is_complex",
    "__len__",
}
_READS = {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__iter__"}


class Placeholder(torch.Tensor):
    """Stands for a tensor that an earlier stage has. It has the shape of the tensor that this one receives.

    Attributes:
        received: That tensor.
    """

    received: torch.Tensor

    @staticmethod
    def of(received: torch.Tensor) -> Placeholder:
        placeholder = torch.empty(0).as_subclass(Placeholder)
        placeholder.received = received
        return placeholder

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "a value of another stage"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        owner = func.__self__ if func.__name__ == "__get__" else func
        name = getattr(owner, "__name__", "")
        if name in _FACTS:
            return func(args[0].received, *args[1:], **(kwargs or {}))
        written = (kwargs or {}).get("out")
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place or name == "__setitem__" or name.startswith("__i"):
            written = args[0]
        if name in _READS or not isinstance(written, Placeholder | None):
            raise _not_here(f"`forward` needs a value of another stage for `{name}`")
        found = first_placeholder((args, kwargs))
        # A new object: a layer may take its first argument only from another stage, see `_enter`.
        return None if found is None else Placeholder.of(found.received)


# A BaseException, so that `except Exception` in a `forward` does not catch it.
class _StageEnd(BaseException):
    """Ends a stage's forward at its call of the next stage's first layer."""


def _not_here(what: str) -> ConfigError:
    return ConfigError(
        f"{what}, which this rank does not have.",
        why="a pipeline calls the model's `forward` on each stage, with its own layers only.",
        fix="move the computation into a layer, such as the one before it: "
        "`def forward(self, x): return compute(self.layer(x))`; or split at other names.",
    )


def first_placeholder(value: Any) -> Placeholder | None:
    """The first placeholder among nested arguments."""
    if isinstance(value, Placeholder):
        return value
    parts = value.values() if isinstance(value, Mapping) else value
    if not isinstance(parts, list | tuple) and parts is value:
        return None
    return next((found for part in parts if (found := first_placeholder(part)) is not None), None)


class Skipped(nn.Module):
    """Takes the place of a layer of another stage, and is of the layer's class too, for `isinstance`.

    It has the layer's plain attributes, but no parameters, buffers and submodules. FSDP2 makes classes in
    the same way.
    """

    kind_of_skipped: type[nn.Module]

    @staticmethod
    def of(layer: nn.Module, unit: str, cut: Cut) -> nn.Module:
        kind = type(layer)
        made: Any = types.new_class(f"Skipped{kind.__name__}", (Skipped, kind))
        made.kind_of_skipped = kind
        skipped: nn.Module = made.__new__(made)
        nn.Module.__init__(skipped)
        skipped.__dict__ |= {
            k: v for k, v in _plain(layer).items() if not isinstance(v, torch.Tensor)
        }
        skipped.__dict__["_place"] = cut, unit
        skipped.__dict__["_removed"] = {*layer._parameters, *layer._buffers, *layer._modules}
        return skipped

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cut, unit = self._place
        return cut.skip(unit, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_removed", ()):  # no AttributeError: `hasattr` would be wrong
            raise _not_here(f"`forward` needs `{self._place[1]}.{name}`")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _plain(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are not torch's own."""
    return {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "forward"}


class Stage(nn.Module):
    """The layers of one stage, under their names in the model. Its forward is that of the model."""

    is_stage = True  # `paceline verify` looks for it

    def __init__(self, cut: Cut, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(layers)  # not `add_module`, which refuses dots
        self._cut = cut

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._cut.forward(*args, **kwargs)


class Cut:
    """The stages of a model that are on this rank.

    Attributes:
        stages: For each stage of the pipeline, its units.
        modules: The stages of this rank by number.
        names: The names of all submodules of the whole model.
    """

    def __init__(
        self, job: Job, module: nn.Module, stages: list[list[str]], own_stages: list[int]
    ) -> None:
        self.stages, self.own_stages = stages, own_stages
        self.names = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
        self._job, self._module, self._forward = job, module, module.forward
        self._stage_of = {unit: stage for stage, units in enumerate(stages) for unit in units}
        self._units = list(self._stage_of)
        self._running: _StageForward | None = None
        self._checked: set[int] = set()  # stages whose layers keep no part of the loss
        layers = {unit: module.get_submodule(unit) for unit in self._units}
        self.modules = {s: Stage(self, {u: layers[u] for u in stages[s]}) for s in own_stages}
        self._skipped = {unit: Skipped.of(layer, unit, self) for unit, layer in layers.items()}
        own_units = {unit for stage in own_stages for unit in stages[stage]}
        self._layers = {u: layers[u] if u in own_units else self._skipped[u] for u in self._units}
        for unit, layer in self._layers.items():
            _put(module, unit, layer)

    @property
    def last_stage(self) -> int:
        """The last stage of the pipeline."""
        return len(self.stages) - 1

    @cached_property
    def _hooks(self) -> list[Any]:
        """The hook of each own layer. Made before the first forward, so that it comes before all others.

        The hooks of FSDP and tensor parallel must see the received tensor.
        """
        found = []
        for unit, layer in self._layers.items():
            if layer is not self._module.get_submodule(unit):
                raise ConfigError(
                    f"{unit} was replaced after the model was split into stages.",
                    where=self._job.where(),
                    fix="replace it before paceline.pipeline.",
                )
            if isinstance(layer, Skipped):
                continue
            hook: Any = partial(self._enter, unit)
            if layer._compiled_call_impl is not None:  # torch.compile would trace it
                hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
            found.append(layer.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
        return found

    def run_stage(
        self,
        stage: int,
        args: Any,
        kwargs: Any,
        received: torch.Tensor | None,
        seed_layers: Callable[[], None] = lambda: None,
    ) -> Any:
        """Compute one of this rank's stages: the tensor to send, or what the model returns.

        Args:
            args, kwargs: The arguments of the model.
            received: What the stage before has sent; None for stage 0.
            seed_layers: Called in a later stage where `forward` calls its first layer. What it draws before
                is thus equal in all stages.
        """
        assert self._hooks
        if stage != self.own_stages[-1]:
            # `forward` may change its arguments in place, and a later stage of this rank gets them too.
            args, kwargs = copy_tensors((args, kwargs))
        self._running = _StageForward(stage, received, seed_layers)
        try:
            return self.modules[stage](*args, **kwargs)
        finally:
            self._running = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward in the stage that is running, inside the hooks of FSDP."""
        run = self._running
        assert run is not None
        try:
            with self._only(run.stage):
                output = self._forward(*args, **kwargs)
        except _StageEnd:
            self._refuse_kept_losses(run)
            return run.sent
        except Exception as error:
            if run.received is None or isinstance(error, PacelineError):
                raise
            raise self._error(
                f"stage {run.stage} cannot skip the computations between the layers of other stages: "
                f"{type(error).__name__}: {error}"
            ) from error
        if run.num_called < len(self._units):
            raise self._error(f"`forward` does not call {self._units[run.num_called]}")
        if first_placeholder(output) is not None:
            raise self._error(
                "`forward` returns a tensor that it computes from a value of an earlier stage"
            )
        return output

    @contextmanager
    def _only(self, stage: int) -> Iterator[None]:
        """Skip the layers of this rank's other stages."""
        others = [u for s in self.own_stages if s != stage for u in self.stages[s]]
        for unit in others:
            _put(self._module, unit, self._skipped[unit])
        try:
            yield
        finally:
            for unit in others:
                _put(self._module, unit, self._layers[unit])

    def _refuse_kept_losses(self, run: _StageForward) -> None:
        """Refuse a layer that keeps a part of the loss as an attribute: only its own stage has it."""
        if run.stage in self._checked or not run.has_grad:
            return
        self._checked.add(run.stage)
        for unit in self.stages[run.stage]:
            for path, each in self._module.get_submodule(unit).named_modules(prefix=unit):
                for name, value in _plain(each).items():
                    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                        raise self._error(
                            f"the forward of {path} keeps a tensor with gradient in `{name}`, such as an "
                            "auxiliary loss, which only stage "
                            f"{run.stage} has"
                        )

    def _count_call(self, unit: str) -> _StageForward:
        """Note that `forward` calls a unit."""
        run = self._running
        if run is None:
            raise _not_here(f"`{unit}` was called outside of a stage's forward")
        expected = (
            self._units[run.num_called] if run.num_called < len(self._units) else "nothing more"
        )
        if unit != expected:
            raise self._error(f"`forward` calls {unit} where {expected} was expected")
        run.num_called += 1
        return run

    def skip(self, unit: str, args: Any, kwargs: Any) -> Placeholder:
        """The call of a layer of another stage."""
        run = self._count_call(unit)
        if self._stage_of[unit] > run.stage:
            run.sent = self.sendable(unit, first_argument(args, kwargs))
            raise _StageEnd
        assert run.received is not None
        if run.num_called == 1:
            run.seed_layers()
        return Placeholder.of(run.received)

    def _enter(self, unit: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before a layer of this rank computes: the received tensor takes the place of its placeholder."""
        stage = self._stage_of[unit]
        is_first = stage > 0 and unit == self.stages[stage][0]
        first = first_argument(args, kwargs)
        if self._running is not None:
            self._count_call(unit)
            if is_first:
                self._begin(unit, first)
        if is_first and isinstance(first, Placeholder):
            # Activation checkpointing comes here in the backward too.
            x = first.received
            args = tuple(x if each is first else each for each in args)
            kwargs = {name: x if each is first else each for name, each in kwargs.items()}
        if first_placeholder((args, kwargs)) is not None:
            raise self._error(
                f"{unit} gets another value than its first argument from an earlier stage"
            )
        return args, kwargs

    def _begin(self, unit: str, first: Any) -> None:
        assert self._running is not None
        if not isinstance(first, Placeholder):
            raise self._error(f"the first argument of {unit} is not computed by the stage before")
        if torch.is_grad_enabled() != self._running.has_grad:
            raise self._error(
                f"`forward` calls {unit} without gradients (torch.no_grad(), or torch.utils.checkpoint with "
                "use_reentrant=True)"
            )
        self._running.received = None

    def sendable(self, unit: str, x: Any) -> torch.Tensor:
        """What is sent of the first argument of a stage's first layer."""
        if type(x) is torch.Tensor and x.dtype in SENDABLE:
            return x.contiguous()
        shown = x.dtype if type(x) is torch.Tensor else type(x).__name__
        raise self._error(f"the first argument of {unit} is a {shown}, not a floating-point tensor")

    def _error(self, what: str) -> ConfigError:
        return ConfigError(
            f"{type(self._module).__name__} cannot be split into these stages: {what}.",
            where=self._job.where(),
            why="a stage passes one tensor to the next: the first argument of its first layer.",
            fix="register layers in the order of their calls; move computations between them into the layer "
            "before, `def forward(self, x): return compute(self.layer(x))`; or split at other names.",
        )


@dataclass
class _StageForward:
    """One forward of one stage.

    Attributes:
        received: What the stage before has sent, until the first layer of this stage takes it.
        seed_layers: Called at the first layer of the model, unless this is its stage.
        sent: The tensor for the next stage, when it is known.
        num_called: How many units `forward` has called.
        has_grad: Whether gradients were enabled when it began.
    """

    stage: int
    received: torch.Tensor | None
    seed_layers: Callable[[], None]
    sent: torch.Tensor | None = None
    num_called: int = 0
    has_grad: bool = field(default_factory=torch.is_grad_enabled)


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()), None)


def _put(module: nn.Module, unit: str, layer: nn.Module) -> None:
    parent, _, name = unit.rpartition(".")
    module.get_submodule(parent)._modules[name] = layer
