"""The state of a training: what a checkpoint holds, and how it is taken up again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.checkpoint.export import read_weights
from paceline.data.plan import Position
from paceline.errors import CheckpointError
from paceline.parallel import ddp as parallel

if TYPE_CHECKING:
    from paceline.training.training import Training

_VERSION = 1


def save(training: Training, kept: dict[str, Any]) -> dict[str, Any]:
    """Everything that a later run needs, under the models' own names; equal on all ranks."""
    tracks = list(training.tracks.values())
    at = training.position
    return {
        "version": _VERSION,
        "step": training.number,
        "position": [at.seed, at.epoch, at.offset],
        "models": [parallel.unwrap(model).state_dict() for model in training.models],
        "optimizers": [track.optimizer.state_dict() for track in tracks],
        "schedules": [t.schedule.state_dict() if t.schedule else {} for t in tracks],
        "divisors": [track.divisor for track in tracks],
        "scaler": training.precision.state_dict(),
        "buckets": training.tuning.state_dict(),
        "exact": training.reproducing.state_dict() if training.reproducing else None,
        "threads": torch.get_num_threads(),
        "kept": {name: thing.state_dict() for name, thing in kept.items()},
    }


def load(training: Training, saved: dict[str, Any], kept: dict[str, Any]) -> tuple[int, Position]:
    """Take up a state; the number of steps done, and where the next one starts.

    Raises:
        CheckpointError: the state is of another kind of training; nothing was changed then.
    """
    _refuse_other(training, saved, kept)
    for model, state in zip(training.models, saved["models"], strict=True):
        parallel.unwrap(model).load_state_dict(state)
    for track, optimizer, schedule, divisor in zip(
        training.tracks.values(),
        saved["optimizers"],
        saved["schedules"],
        saved["divisors"],
        strict=True,
    ):
        track.optimizer.load_state_dict(optimizer)
        track.divisor = divisor
        if track.schedule is not None:
            track.schedule.load_state_dict(schedule)
    training.precision.load_state_dict(saved["scaler"])
    training.tuning.load_state_dict(saved.get("buckets", {}))  # older ones have none
    if training.reproducing is not None:
        training.reproducing.load_state_dict(saved["exact"])
        torch.set_num_threads(saved["threads"])
    for name, thing in kept.items():
        thing.load_state_dict(saved["kept"][name])
    return saved["step"], Position(*saved["position"])


def tensors(
    models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """What is saved of models and optimizers now, by the path that it has in a state."""
    found: dict[str, torch.Tensor] = {}
    for number, model in enumerate(models):
        for name, value in parallel.unwrap(model).state_dict().items():
            if isinstance(value, torch.Tensor):
                found[f"models.{number}.{name}"] = value
    for number, optimizer in enumerate(optimizers):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    found[f"optimizers.{number}.state.{index}.{name}"] = value
    return found


def like(
    models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> Callable[[str], torch.Tensor | None]:
    """For a path in a state, a tensor that is sharded as what is there will be.

    A new optimizer has no state yet; what it will have for a parameter is sharded as that is.
    """
    known = tensors(models, [])
    for number, optimizer in enumerate(optimizers):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        known |= {f"optimizers.{number}.state.{i}": p for i, p in enumerate(parameters)}
    return lambda path: known.get(path, known.get(path.rpartition(".")[0]))


def load_weights(model: torch.nn.Module, path: str | Path, *, number: int = 0) -> None:
    """Give a model the weights in a file (`.pth`, `.safetensors`) or a checkpoint; nothing else.

    Args:
        model: Wrapped or not; names with and without `module.` both fit.
        path: Of the file, of a folder of checkpoints (the newest), of one `step-N`, or its URL.
        number: Of the model in a checkpoint that has several.

    Raises:
        CheckpointError: there are no weights, or of another model; the model is untouched then.

    Collective: none; call it on all ranks.
    """
    weights = read_weights(path, number)
    _refuse_other_shapes([model], [weights])
    parallel.unwrap(model).load_state_dict(weights)


def _refuse_other(training: Training, saved: dict[str, Any], kept: dict[str, Any]) -> None:
    job = training.job
    if saved.get("version") != _VERSION:
        raise CheckpointError(f"this is no state of a training: version {saved.get('version')}.")
    if saved["position"][0] != job.seed:
        raise CheckpointError(
            f"the checkpoint was trained with seed {saved['position'][0]}, this job has {job.seed}.",
            fix="join with the same seed, or start anew with resume='never'.",
        )
    differing = sorted(set(kept) ^ set(saved["kept"]))
    if differing:
        raise CheckpointError(
            f"the checkpoint holds another set of objects; {', '.join(differing)} differ.",
            fix="keep() the same objects as the run that saved it.",
        )
    if len(saved["models"]) != len(training.models) or len(saved["optimizers"]) != len(
        training.tracks
    ):
        raise CheckpointError("the checkpoint holds other numbers of models or optimizers.")
    if (saved["exact"] is None) != (training.reproducing is None):
        raise CheckpointError(
            "the checkpoint and this training differ in `reproducible`.",
            why="the bits of a training depend on it from the first step.",
            fix="use the setting of the run that saved it, or resume='never'.",
        )
    _refuse_other_shapes(training.models, saved["models"])
    for number, (track, state) in enumerate(
        zip(training.tracks.values(), saved["optimizers"], strict=True)
    ):
        ours, theirs = (
            [len(group["params"]) for group in groups]
            for groups in (track.optimizer.param_groups, state["param_groups"])
        )
        if ours != theirs:
            raise CheckpointError(
                f"optimizer {number} has groups of {ours} parameters, the checkpoint of {theirs}.",
                fix="build the optimizer that was saved, or resume='never'.",
            )


def _refuse_other_shapes(models: Sequence[torch.nn.Module], saved: Sequence[Any]) -> None:
    for model, state in zip(models, saved, strict=True):
        own = parallel.unwrap(model).state_dict()
        for name in sorted(set(own) | set(state)):
            ours, theirs = (_shape(d.get(name)) for d in (own, state))
            if ours != theirs:
                raise CheckpointError(
                    f"{name}: the model has {ours}, the checkpoint has {theirs}.",
                    fix="build the model that was saved, or resume='never'.",
                    parameter=name,
                )


def _shape(value: Any) -> str:
    if value is None:
        return "nothing of that name"
    return f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
