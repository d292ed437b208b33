"""Gives the ranks of a replay the batches of the solo run, and its weights before each evaluation.

The solo run keeps them as files. A mirrored run gives each rank the whole batch, a dealt run splits it among
the ranks. With equal data and weights, the script causes every remaining difference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.audit.evidence import RunPlan
from paceline.audit.models import Models
from paceline.audit.progress import Progress

_NOTHING = object()


def same_weights(progress: Progress, models: Models) -> None:
    """Before an evaluation: keep the weights of the solo run, or load them in a replay."""
    name = f"weights-{progress.evaluations}.pt"
    if progress.plan.mode == "solo":
        states = {number: model.state_dict() for number, model in models.all().items()}
        torch.save(states, progress.plan.folder / name)
    elif progress.plan.solo is not None and (path := progress.plan.solo / name).exists():
        states = torch.load(path, map_location="cpu", weights_only=True)
        own = models.all()
        with torch.no_grad():
            for number, state in states.items():
                if number in own:
                    _copy(own[number].state_dict(), state)


def _copy(own: dict[str, Any], state: dict[str, Any]) -> None:
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and name in own and own[name].shape == value.shape:
            own[name].copy_(value)


def batch_path(folder: Path, loader: str, lap: int, number: int) -> Path:
    """The file of a batch of the solo run."""
    return folder / f"batch-{loader}-{lap}-{number}.pt"


def keep_batch(progress: Progress, loader: str, lap: int, number: int, batch: Any) -> None:
    """Keep a batch of the solo run for its replays."""
    torch.save(batch, batch_path(progress.plan.folder, loader, lap, number))


def batches(progress: Progress, loader: str, lap: int) -> Iterator[Any]:
    """The batches of one pass of the solo run's loader, or this rank's part of each."""
    plan = progress.plan
    assert plan.solo is not None
    number = 0
    while (path := batch_path(plan.solo, loader, lap, number)).exists():
        # The file was written by the solo run; a batch may contain any objects.
        batch = torch.load(path, weights_only=False)
        if plan.mode == "dealt":
            batch = _part(batch, progress.rank, plan.world_size)
        if batch is _NOTHING:
            return
        yield batch
        number += 1


def _part(value: Any, rank: int, world_size: int) -> Any:
    """Every `world_size`th sample of a collated batch; `_NOTHING` if this rank gets none."""
    if isinstance(value, torch.Tensor):
        if value.dim() == 0:
            return value  # it belongs to the whole batch
        part = value[rank::world_size]
        return part if len(part) else _NOTHING
    if isinstance(value, Mapping):
        parts = {key: _part(item, rank, world_size) for key, item in value.items()}
        if any(part is _NOTHING for part in parts.values()):
            return _NOTHING
        kind: Any = type(value)
        return parts if kind is dict else kind(parts)
    if is_dataclass(value) and not isinstance(value, type):
        own = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
        cut = {name: _part(item, rank, world_size) for name, item in own.items()}
        if any(part is _NOTHING for part in cut.values()):
            return _NOTHING
        return replace(value, **cut)
    if isinstance(value, list) and value and all(isinstance(x, str | int | float) for x in value):
        return value[rank::world_size] or _NOTHING
    if isinstance(value, list | tuple):
        items = [_part(item, rank, world_size) for item in value]
        if any(item is _NOTHING for item in items):
            return _NOTHING
        is_named = hasattr(value, "_fields")
        return type(value)(*items) if is_named else type(value)(items)
    return value


def training_loaders(plan: RunPlan) -> dict[str, int | None]:
    """The training loaders of the solo run and their lengths; empty if this run is no replay."""
    if plan.solo is None or not plan.replays:
        return {}
    lengths: dict[str, int | None] = {}
    training: dict[str, int | None] = {}
    last = ""
    for line in (plan.solo / "rank0.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["k"] == "loader":
            lengths[event["loader"]] = event["batches"]
        elif event["k"] == "batch":
            last = event["loader"]
        elif event["k"] == "backward" and last:
            training[last] = lengths[last]
    return training
