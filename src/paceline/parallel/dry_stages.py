"""`DryStages`: what the stages of a pipeline receive in `paceline run --dry-run`, where no rank sends it.

The shapes come from the forward of a copy of the whole model. Its tensors are torch's fake tensors: they have
a shape, a dtype and a device, but no memory and no values.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline import torch_private
from paceline.errors import ConfigError, PacelineError
from paceline.job.job import Job
from paceline.parallel.stage_cut import first_argument

FAKE_TENSORS = "torch._subclasses.fake_tensor.FakeTensorMode"


# A BaseException, so that `except Exception` in a `forward` does not catch it.
class _Found(BaseException):
    """Ends the forward when all is known."""


class DryStages:
    """A copy of the whole model without memory. Made before the model is cut."""

    def __init__(
        self, job: Job, module: nn.Module, stages: list[list[str]], own_stages: list[int]
    ) -> None:
        mode = torch_private.find(FAKE_TENSORS)
        if mode is None:
            raise ConfigError(
                "a pipeline cannot be run by `paceline run --dry-run`.",
                why=f"this version of torch has no {FAKE_TENSORS}.",
                fix="leave the axis pp out of the dry run.",
            )
        self._job, self._mode = job, mode(allow_non_fake_inputs=True)
        memo: dict[int, Any] = {}
        with self._mode:
            for buffer in module.buffers():
                memo[id(buffer)] = self._like(buffer)
            for p in module.parameters():
                memo[id(p)] = nn.Parameter(self._like(p), requires_grad=p.requires_grad)
        self._module = copy.deepcopy(module, memo)
        self._received: dict[int, Any] = {}
        self._later = [stage for stage in own_stages if stage > 0]
        for stage in self._later:
            first = self._module.get_submodule(stages[stage][0])
            first.register_forward_pre_hook(partial(self._enter, stage), with_kwargs=True)

    def compute_in(self, dtype: torch.dtype) -> None:
        """Cast parameters, and the arguments of the model, as `fsdp(param_dtype=)` does."""

        def cast(x: Any) -> Any:
            return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

        def cast_arguments(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return tuple(map(cast, args)), {name: cast(x) for name, x in kwargs.items()}

        with self._mode:
            for p in self._module.parameters():
                p.data = cast(p.data)
        self._module.register_forward_pre_hook(cast_arguments, with_kwargs=True)

    def _like(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=self._job.device)

    def receive(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[int, Any]:
        """The first argument of each stage of this rank but stage 0, for the model's arguments.

        A tensor is of zeros. A stage that `forward` does not reach has None.

        Raises:
            ConfigError: the forward needs values.
        """
        self._received = dict.fromkeys(self._later)
        if not self._later:
            return {}
        try:
            with self._mode, torch.no_grad():
                self._module(*args, **kwargs)
        except _Found:
            pass
        except PacelineError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the shapes that the stages receive are unknown: {type(error).__name__}: {error}",
                where=self._job.where(),
                why="a dry run computes earlier stages on tensors without values. `forward` must not read "
                "any, as `x.item()`, `if (x > 0).any():` and `x[mask]` do.",
                fix="leave the axis pp out of the dry run.",
            ) from error
        return {
            stage: torch.zeros(x.shape, dtype=x.dtype, device=self._job.device)
            if isinstance(x, torch.Tensor)
            else x
            for stage, x in self._received.items()
        }

    def _enter(self, stage: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._received[stage] = first_argument(args, kwargs)
        if stage == self._later[-1]:
            raise _Found
