"""Gives the ranks of a replay the batches of the solo run, and its weights in evaluations.

The solo run saves its batches as files, and its weights in each evaluation with a result: a value that the
script reduces, gathers or reads. In a mirrored run each rank gets the whole batch; in a divided run each rank
gets a part of it. Its data, and in evaluations its weights, are then those of the solo run, so the script
causes every remaining difference. A same-weights run has its own data, and gets the weights only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parameter import is_lazy

from paceline.audit import evidence
from paceline.audit.digests import number_of_samples
from paceline.audit.events import LoaderSeen
from paceline.audit.models import Models, state_by_name
from paceline.audit.progress import Progress
from paceline.audit.run_plan import REPLAYS, RunPlan
from paceline.data.digest import plain


class _NoSamples(Exception):
    """A batch has fewer samples than there are ranks, so this rank gets none."""


def begin_evaluation(progress: Progress, models: Models) -> None:
    """Before an evaluation: in the solo run copy its weights, in a later run load what the solo run saved."""
    if progress.plan.mode == "solo":
        progress.weights_of_evaluation = {
            number: {
                key: plain(value).clone()
                for key, value in state_by_name(model).items()
                if isinstance(value, torch.Tensor) and not is_lazy(value)
            }
            for number, model in models.by_number().items()
        }
    elif progress.plan.solo is not None:
        path = _weights_path(progress.plan.solo, progress.evaluation)
        if not path.exists():
            return
        states = torch.load(path, map_location="cpu", weights_only=True)
        for number, model in models.by_number().items():
            own = state_by_name(model)
            for key, value in states.get(number, {}).items():
                mine = own.get(key)
                if (
                    isinstance(mine, torch.Tensor)
                    and not is_lazy(mine)
                    and mine.shape == value.shape
                ):
                    progress.after_evaluation.append(_load(mine, value))


def _load(own: torch.Tensor, value: torch.Tensor) -> Callable[[], None]:
    """Load a tensor of the solo run into that of a rank, and return what puts the rank's own values back."""
    if isinstance(own, DTensor):
        # Not from rank 0: a rank may evaluate alone.
        value = distribute_tensor(
            value.to(own.device), own.device_mesh, own.placements, src_data_rank=None
        )
    before = own.clone()
    own.copy_(value)
    loaded = own.clone()

    def put_back() -> None:
        if torch.equal(plain(own), plain(loaded)):  # else the script has changed it in the meantime
            own.copy_(before)

    return put_back


def save_weights(progress: Progress) -> None:
    """Save the weights of this evaluation of the solo run, because it has a result, which rules compare."""
    if progress.weights_of_evaluation is not None:
        path = _weights_path(progress.plan.folder, progress.evaluation)
        torch.save(progress.weights_of_evaluation, path)
        progress.weights_of_evaluation = None


def _weights_path(folder: Path, evaluation: int | None) -> Path:
    return folder / f"weights-{evaluation}.pt"


def _batch_path(folder: Path, loader: str, pass_number: int, number: int) -> Path:
    return folder / f"batch-{loader}-{pass_number}-{number}.pt"


def keep_batch(progress: Progress, loader: str, pass_number: int, number: int, batch: Any) -> str:
    """Keep a batch of the solo run for its replays, and return the error if it cannot be saved."""
    try:
        torch.save(batch, _batch_path(progress.plan.folder, loader, pass_number, number))
    except Exception as error:  # such as for a class that is defined in a function
        return f"{type(error).__name__}: {error}"
    return ""


def batches(progress: Progress, loader: str, pass_number: int) -> Iterator[Any]:
    """The batches of one pass of the solo run's loader, or this rank's part of each."""
    plan = progress.plan
    assert plan.solo is not None
    for number in itertools.count():
        path = _batch_path(plan.solo, loader, pass_number, number)
        if not path.exists():
            return
        # The solo run wrote this file; a batch may contain any objects.
        batch = torch.load(path, weights_only=False)
        if plan.mode == "divided":
            try:
                batch = _part(batch, number_of_samples(batch), progress.rank, plan.world_size)
            except _NoSamples:
                return
        yield batch


def _part(value: Any, samples: int | None, rank: int, world_size: int) -> Any:
    """Every `world_size`th sample of a collated batch of so many samples, from sample `rank` on.

    Raises:
        _NoSamples: this rank gets none.
    """
    if _has_item_per_sample(value, samples):
        part = value[rank::world_size]
        if not len(part):
            raise _NoSamples
        return part
    if isinstance(value, Mapping):
        parts = {key: _part(item, samples, rank, world_size) for key, item in value.items()}
        kind: Any = type(value)
        return parts if kind is dict else kind(parts)
    if is_dataclass(value) and not isinstance(value, type):
        own = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
        return replace(
            value, **{k: _part(item, samples, rank, world_size) for k, item in own.items()}
        )
    if isinstance(value, list | tuple):
        items = [_part(item, samples, rank, world_size) for item in value]
        is_named = hasattr(value, "_fields")
        return type(value)(*items) if is_named else type(value)(items)
    return value  # it belongs to the whole batch


def _has_item_per_sample(value: Any, samples: int | None) -> bool:
    """Whether it is a tensor or a list with one item for each sample, such as the boxes of each image."""
    if isinstance(value, torch.Tensor):
        return value.dim() > 0 and len(value) == samples
    if not isinstance(value, list | tuple) or hasattr(value, "_fields") or not value:
        return False
    if samples not in (None, len(value)):
        return False
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return True
    # Otherwise each item holds all samples, such as the inputs and the labels.
    return any(number_of_samples(item) != samples for item in value)


def replayed_loaders(plan: RunPlan) -> dict[str, LoaderSeen]:
    """The training loaders of the solo run, by name; empty if this run is no replay."""
    if plan.solo is None or plan.mode not in REPLAYS:
        return {}
    solo = evidence.read_logs(plan.solo, 1)[0]
    return {name: solo.loaders[name] for name in solo.training_loaders}
