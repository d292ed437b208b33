"""The forward of one pipeline stage, computed by the model's own `forward`.

A model with

    def forward(self, ids):
        mask = ids != 0
        x = self.embedding(ids)
        x = self.block1(x, mask) * 2
        x = self.block2(x, mask)
        return self.head(x)

and the stages [embedding, block1] and [block2, head] is computed in two parts:

- Stage 0 calls `forward(ids)`. The call of `block2` ends it (`_StageEnd`), and its first argument is sent.
- Stage 1 receives that tensor, and calls `forward(ids)` too. `embedding` and `block1` compute nothing: they
  return placeholders, tensors with a shape and without values. `mask` is computed again. At the call of
  `block2` the received tensor takes the place of the placeholder, and from there on everything has values.

For this, each submodule is replaced by an `_Interceptor` under its own name: submodules of other ranks
permanently, and this rank's own ones while a stage computes its forward or backward, because activation
checkpointing calls submodules again in the backward. So parameters keep the names of the whole model.

A unit is the name of a submodule that belongs to one stage as a whole (see `pipeline_stages`). Submodules
without parameters and buffers belong to no stage and compute on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from paceline import torch_private
from paceline.data.device import copy_tensors
from paceline.errors import ConfigError, PacelineError
from paceline.job.job import Job
from paceline.parallel.pipeline_stages import stateless_layers

# Dtypes of tensors that stages may send.
SENDABLE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class ModelPart:
    """The part of a model that one rank of a pipeline holds, and the forwards of its stages.

    Attributes:
        stages: For each stage of the pipeline, its units.
        units: The units of all stages, in the order of their calls.
        stage_of: The stage of each unit.
        own_stages: The stages of this rank.
        layers: This rank's submodules, by unit, and those that belong to no stage.
        running: The forward of a stage in progress.
    """

    def __init__(
        self, job: Job, module: nn.Module, stages: list[list[str]], own_stages: list[int]
    ) -> None:
        self.module, self.stages, self.own_stages = module, stages, own_stages
        self.stage_of = {unit: stage for stage, units in enumerate(stages) for unit in units}
        self.units = list(self.stage_of)
        self.running: _StageForward | None = None
        self.layers: dict[str, nn.Module] = {}
        self._job = job
        self._model_forward = module.forward
        self._interceptors: dict[str, _Interceptor] = {}
        for unit in [*self.units, *stateless_layers(module, self.units)]:
            layer = module.get_submodule(unit)
            stage = self.stage_of.get(unit)
            if stage is None or stage in own_stages:
                self.layers[unit] = layer
                self._interceptors[unit] = _Interceptor(self, unit, layer, type(layer))
            else:
                missing = _Interceptor(self, unit, None, type(layer))
                self._interceptors[unit] = missing.train(layer.training)
                self._put(unit, missing)

    @property
    def last_stage(self) -> int:
        """The last stage of the pipeline."""
        return len(self.stages) - 1

    def layers_of(self, stage: int) -> list[nn.Module]:
        """The submodules of one of this rank's stages."""
        return [self.layers[unit] for unit in self.stages[stage]]

    def _put(self, unit: str, layer: nn.Module) -> None:
        parent, _, name = unit.rpartition(".")
        setattr(self.module.get_submodule(parent), name, layer)

    @contextlib.contextmanager
    def intercepted(self) -> Iterator[None]:
        """Replace this rank's submodules, for the forward or backward of a stage."""
        for unit, interceptor in self._interceptors.items():
            if self.module.get_submodule(unit) is not self.layers.get(unit, interceptor):
                raise self._replaced_error(unit)
        for unit, layer in self.layers.items():
            self._interceptors[unit].training = layer.training
            self._put(unit, self._interceptors[unit])
        try:
            yield
        finally:
            for unit, layer in self.layers.items():
                self._put(unit, layer)

    def compute_stage(
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
            seed_layers: Called before the first submodule of a later stage. What the model's `forward` draws
                before its submodules is thus equal in all stages.
        """
        if stage != self.own_stages[-1]:
            # `forward` may change its arguments in place, and a later stage of this rank gets them too.
            args, kwargs = copy_tensors((args, kwargs))
        self.running = _StageForward(self, stage, received, seed_layers)
        try:
            with self.intercepted():
                output = self._model_forward(*args, **kwargs)
            self.running.check_end(output)
            return output
        except _StageEnd as end:
            return self._sendable(stage, end.args[0])
        except StopIteration as error:
            raise self._no_parameters_error() from error
        except Exception as error:
            if self.running.has_begun or isinstance(error, PacelineError):
                raise
            raise self.split_error(
                f"stage {stage} cannot skip the computations between the submodules before it: "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            self.running = None

    def _sendable(self, stage: int, x: Any) -> torch.Tensor:
        if isinstance(x, torch.Tensor) and x.dtype in SENDABLE:
            return x.contiguous()
        shown = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise self.split_error(
            f"the first argument of {self.stages[stage + 1][0]} is a {shown}, not a floating-point tensor"
        )

    def split_error(self, what: str) -> ConfigError:
        return ConfigError(
            f"{type(self.module).__name__} cannot be split into these stages: {what}.",
            where=self._job.where(),
            why="a stage passes one tensor to the next: the first argument of its first submodule.",
            fix="register submodules in the order of their calls, move computations between them into "
            "submodules, or split at other names.",
        )

    def _replaced_error(self, unit: str) -> ConfigError:
        return ConfigError(
            f"{unit} was replaced after paceline.pipeline(...).",
            where=self._job.where(),
            why="the stages hold the submodules that the model had then.",
            fix="replace submodules before paceline.pipeline(...). To compile one, call its `compile()`.",
        )

    def _no_parameters_error(self) -> ConfigError:
        return ConfigError(
            f"the `forward` of {type(self.module).__name__} raised StopIteration.",
            where=self._job.where(),
            why="the submodules of a module that is split are replaced during its `forward`, so for example "
            "`next(self.parameters())` finds none. Or another iterator in it has ended.",
            fix="take the dtype and the device from an argument of `forward`; see the cause above.",
        )


# A BaseException, so that `except Exception` in the model does not catch it.
class _StageEnd(BaseException):
    """Ends the model's `forward` where the next stage begins; holds the tensor that is sent."""


class _StageForward:
    """One forward of one stage: decides what each call of a submodule does.

    Attributes:
        has_begun: Whether the stage's own submodules have begun, so that tensors have values.
    """

    def __init__(
        self,
        part: ModelPart,
        stage: int,
        received: torch.Tensor | None,
        seed_layers: Callable[[], None],
    ) -> None:
        self.has_begun = stage == 0
        self._seed_layers = seed_layers
        self._part = part
        self._stage = stage
        self._received = received
        self._has_grad = torch.is_grad_enabled()
        self._num_called = 0

    def call(self, unit: str, layer: nn.Module | None, args: Any, kwargs: Any) -> Any:
        """The call of a submodule by `forward`: compute it, skip it, or end the stage."""
        owner = self._part.stage_of.get(unit)
        if owner is None:
            return self._call_stateless(layer, args, kwargs)
        if unit != self._next:
            raise self._error(f"`forward` calls {unit} where {self._next} was expected")
        self._num_called += 1
        if owner < self._stage:
            return self._placeholder()
        if owner > 0 and unit == self._part.stages[owner][0]:
            first = args[0] if args else next(iter(kwargs.values()), None)
            if owner > self._stage:
                raise _StageEnd(first)
            self._begin(unit, first)
            args, kwargs = _with_received(args, kwargs)
        if _has_placeholder((args, kwargs)):
            raise self._error(
                f"{unit} gets another value than its first argument from an earlier stage"
            )
        assert layer is not None
        return layer(*args, **kwargs)

    def _call_stateless(self, layer: nn.Module | None, args: Any, kwargs: Any) -> Any:
        assert layer is not None
        try:
            return layer(*args, **kwargs)
        except Exception:
            if _has_placeholder((args, kwargs)):  # of the received shape, which may not fit
                return self._placeholder()
            raise

    def _begin(self, unit: str, first: Any) -> None:
        """Let the received tensor take the place of `first`, the first argument of the stage's first unit."""
        if not _has_placeholder(first):
            raise self._error(f"the first argument of {unit} is not computed by the stage before")
        if torch.is_grad_enabled() != self._has_grad:
            raise self._error(
                f"`forward` calls {unit} without gradients (torch.no_grad(), or torch.utils.checkpoint with "
                "use_reentrant=True)"
            )
        first.received = self._received
        self.has_begun = True
        self._seed_layers()

    def _placeholder(self) -> torch.Tensor:
        """What a skipped submodule returns. It has the shape of the received tensor."""
        received = self._received
        assert received is not None
        fake = _without_values(received.shape, received.dtype, received.device)
        return torch.empty_like(fake)

    @property
    def _next(self) -> str:
        units = self._part.units
        return units[self._num_called] if self._num_called < len(units) else "nothing more"

    def check_end(self, output: Any) -> None:
        """Check a forward that returned."""
        if self._num_called < len(self._part.units):
            raise self._error(f"`forward` does not call {self._next}")
        if _has_placeholder(output):
            raise self._error(
                "`forward` returns a tensor that it computes from a value of an earlier stage"
            )

    def _error(self, what: str) -> ConfigError:
        return self._part.split_error(what)


class _Interceptor(nn.Module):
    """Replaces a submodule, so that its calls by the model's `forward` reach `_StageForward.call`.

    Args:
        layer: The submodule; None if another rank holds it.
        kind: The type of the submodule, for an `isinstance` in `forward`.
    """

    def __init__(
        self, part: ModelPart, name: str, layer: nn.Module | None, kind: type[nn.Module]
    ) -> None:
        super().__init__()
        self._kind = kind
        self._target = part, name, layer  # a tuple, so that torch does not register the layer

    @property  # type: ignore[misc]
    def __class__(self) -> type[nn.Module]:  # type: ignore[override]
        kind: type[nn.Module] = self.__dict__.get("_kind", _Interceptor)
        return kind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        part, name, layer = self._target
        if part.running is not None:
            return part.running.call(name, layer, args, kwargs)
        if layer is None:
            raise self._missing(f"`{name}` cannot be called")
        # Activation checkpointing computes it again in the backward, with the arguments that `forward` gave.
        args, kwargs = _with_received(args, kwargs)
        if name in part.stage_of and _has_placeholder((args, kwargs)):
            raise part.split_error(
                f"{name} is computed again in the backward with a value of an earlier stage"
            )
        return layer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or name == "_target":
                raise
        _, path, layer = self._target
        if layer is None:
            raise self._missing(f"`{path}.{name}` cannot be read")
        return getattr(layer, name)

    def _missing(self, what: str) -> _NotHere:
        return _NotHere(
            f"`{self._target[1]}` is on another stage, so {what} on this rank.",
            why="a pipeline calls the model's `forward` on each stage, with its own submodules only.",
            fix="move the computation into a submodule.",
        )


class _NotHere(ConfigError, AttributeError):
    """An attribute of a submodule that another stage holds; `hasattr` must see an AttributeError."""


def _with_received(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments with the received tensor in place of its placeholder."""

    def replace(value: Any) -> Any:
        return getattr(value, "received", value) if isinstance(value, torch.Tensor) else value

    return tuple(map(replace, args)), {key: replace(value) for key, value in kwargs.items()}


def _has_placeholder(value: Any) -> bool:
    """Whether a placeholder is among nested arguments."""
    if isinstance(value, torch.Tensor):
        return value.is_meta or hasattr(value, "fake_mode")
    if isinstance(value, Mapping):
        return any(map(_has_placeholder, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_placeholder, value))


@functools.lru_cache(maxsize=16)  # making a mode is slow; a forward needs one shape
def _without_values(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor on this device without memory. torch computes shapes with it, but no values."""
    mode = torch_private.find("torch._subclasses.FakeTensorMode")
    if mode is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    with mode(allow_non_fake_inputs=True):
        return torch.empty(shape, dtype=dtype, device=device)
