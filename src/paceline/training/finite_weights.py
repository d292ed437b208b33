"""Which tensors of a model must be finite when it is saved, or when its training ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.errors import NonFinite
from paceline.job.job import Job
from paceline.training import state


def _must_be_finite(name: str, tensor: torch.Tensor) -> bool:
    """Whether infinity in a tensor means that the training has diverged.

    A tensor that is not trained may hold infinity by design, such as the mask of an attention; but infinite
    statistics of a BatchNorm come from the training.
    """
    return tensor.requires_grad or name.endswith(("running_mean", "running_var"))


def may_be_infinite(models: Sequence[torch.nn.Module]) -> list[str]:
    """The paths in a saved state of the tensors of models that may hold infinity. None may hold NaN."""
    return [
        f"models.{number}.{name}"
        for number, model in enumerate(models)
        for name, tensor in state.named_tensors(model)
        if not _must_be_finite(name, tensor)
    ]


def refuse_non_finite_weights(job: Job, models: Sequence[torch.nn.Module], step: int) -> None:
    """Raise NonFinite if a parameter holds NaN, or infinity that it may not hold, after `step`."""
    for model in models:
        for name, tensor in state.named_tensors(model):
            if not isinstance(tensor, torch.nn.Parameter):
                continue
            is_finite = _must_be_finite(name, tensor)
            is_right = torch.isfinite(tensor) if is_finite else ~torch.isnan(tensor)
            if not bool(is_right.all()):
                raise NonFinite(
                    f"{name} holds NaN or infinity after step {step}.",
                    where=job.where(),
                    fix="train again, or from a checkpoint before that, with a lower learning rate.",
                    quantity="parameter",
                    parameters=[name],
                    step=step,
                )
