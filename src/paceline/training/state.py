"""The state of models and optimizers, under the names of the parameters.

Parameters are named as in the model itself, without what torch's wrappers add (`module.`, `_orig_mod.`,
`_checkpoint_wrapped_module.`). The state of optimizers uses these names too. A saved state therefore fits any
number of ranks, any sharding, and the model with or without `torch.compile` and activation checkpointing.

The functions of `torch.distributed.checkpoint.state_dict` give the same names but are not used:
`get_optimizer_state_dict` calls `step` on a new optimizer; see docs/inside/decisions/0021-state-by-name.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from paceline.checkpoint.layout import described
from paceline.errors import CheckpointError
from paceline.parallel.modules import INNER, owned_parameters, plain_name, sharded_like, unwrap

Models = Sequence[torch.nn.Module]
Optimizers = Sequence[torch.optim.Optimizer]
_Names = dict[int, tuple[str, torch.Tensor]]  # by the id of a parameter: its name, and itself

_VERSION = 2
_SAME_MODEL = "build the same model as the run that saved it, or choose another folder."
_SAME_OPTIMIZER = "build the same optimizer as the run that saved it, or choose another folder."


def save(models: Models, optimizers: Optimizers) -> dict[str, Any]:
    """The state of models and optimizers, with tensors that share memory with them.

    A parameter's name in an optimizer is `NUMBER.NAME`: the number of its model and its name there.
    """
    # First: this shards a model of FSDP again that a failure has left gathered.
    states = [_state_of(model) for model in models]
    names = _parameter_names(models)
    return {
        "version": _VERSION,
        "models": states,
        "optimizers": [_named(optimizer, names) for optimizer in optimizers],
        "optimizer_types": [type(optimizer).__name__ for optimizer in optimizers],
    }


def load(models: Models, optimizers: Optimizers, saved: Mapping[str, Any]) -> None:
    """Load what `save` returned; call `check` first."""
    names = _parameter_names(models)
    for model, values in zip(models, saved["models"], strict=True):
        _load_model(model, values)
    for optimizer, values in zip(optimizers, saved["optimizers"], strict=True):
        parameters = owned_parameters(optimizer)
        state: dict[Any, Any] = dict(values["state"])
        groups: list[dict[str, Any]] = [dict(group) for group in values["param_groups"]]
        grouped = _group_names(optimizer, names)
        index = {name: i for i, name in enumerate(chain(*grouped))}
        state = {index.get(name, name): value for name, value in state.items()}
        for group, own in zip(groups, grouped, strict=True):
            group["params"] = [index[name] for name in own]
        for key, value in state.items():
            if isinstance(key, int) and isinstance(value, Mapping):
                p = parameters[key]
                state[key] = {name: sharded_like(p, part) for name, part in value.items()}
        optimizer.load_state_dict({**values, "state": state, "param_groups": groups})


def check(models: Models, optimizers: Optimizers, saved: Mapping[str, Any]) -> None:
    """Refuse a state that does not fit these models and optimizers. Changes nothing.

    Raises:
        CheckpointError: the parameters, shapes, groups or the version differ.
    """
    version = saved.get("version")
    if version != _VERSION:
        raise CheckpointError(
            f"the state has version {version}; this release reads version {_VERSION}."
        )
    for kind, own in (("models", models), ("optimizers", optimizers)):
        if len(saved[kind]) != len(own):
            raise CheckpointError(
                f"the checkpoint holds {len(saved[kind])} {kind}, not {len(own)}."
            )
    for model, values in zip(models, saved["models"], strict=True):
        _check_shapes(model, values)
    names = _parameter_names(models)
    for optimizer_index, (optimizer, values, other_type) in enumerate(
        zip(optimizers, saved["optimizers"], saved["optimizer_types"], strict=True)
    ):
        ours = _group_names(optimizer, names)
        theirs = [group["params"] for group in values["param_groups"]]
        sizes = [[len(group) for group in groups] for groups in (ours, theirs)]
        if sizes[0] != sizes[1]:
            raise CheckpointError(
                f"optimizer {optimizer_index} has groups of {sizes[0]} parameters, the checkpoint of "
                f"{sizes[1]}.",
                fix=_SAME_OPTIMIZER,
            )
        for group, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            if differing := sorted(set(mine) ^ set(other)):
                raise CheckpointError(
                    f"group {group} of optimizer {optimizer_index} and of the checkpoint differ in "
                    f"{differing[0]}.",
                    fix=_SAME_OPTIMIZER,
                    parameter=differing[0],
                )
        if type(optimizer).__name__ != other_type:
            raise CheckpointError(
                f"optimizer {optimizer_index} is {type(optimizer).__name__}, the checkpoint was trained with "
                f"{other_type}.",
                fix=_SAME_OPTIMIZER,
            )


def fitted(own: Any, saved: Any) -> Any:
    """The saved state of any object with the names and the sharding of its own state.

    Args:
        own: What `state_dict` of the object returns now.
        saved: What it returned when it was saved. Tensors are whole, or sharded as those in `own`.
    """
    if isinstance(own, Mapping) and type(saved) is dict:  # a Counter stays one
        match = _matching(own)
        names = [match(name) for name in saved]
        if len(set(names)) < len(saved):
            names = list(saved)
        return {
            name: fitted(own.get(name), value)
            for name, value in zip(names, saved.values(), strict=True)
        }
    if type(saved) in (list, tuple) and type(own) is type(saved) and len(own) == len(saved):
        return type(saved)(fitted(*each) for each in zip(own, saved, strict=True))
    return sharded_like(own, saved)


def _matching(own: Iterable[Any]) -> Callable[[Any], Any]:
    """A function from a saved name to the one in `own` that differs from it only in names of wrappers."""
    known: dict[Any, list[Any]] = {}
    for name in own:
        known.setdefault(_without_wrappers(name), []).append(name)

    def match(name: Any) -> Any:
        found = known.get(_without_wrappers(name), [])
        return found[0] if len(found) == 1 and name not in found else name

    return match


def _without_wrappers(name: Any) -> Any:
    if not isinstance(name, str):
        return name
    return ".".join(part for part in name.split(".") if part not in ("module", *INNER))


def templates(
    models: Models, optimizers: Optimizers, others: Mapping[str, torch.Tensor] | None = None
) -> Callable[[str], torch.Tensor | None]:
    """A function from a path in a saved state to a tensor that is sharded as the loaded one must be.

    A new optimizer has no state yet; the state of a parameter is sharded as the parameter.

    Args:
        others: Tensors of other objects, by path; their names there may have the parts that wrappers add.
    """
    known: dict[str, torch.Tensor] = dict(others or {})
    match = _matching(list(known))
    for number, model in enumerate(models):
        for name, value in _state_of(model).items():
            if isinstance(value, torch.Tensor):
                known[f"models.{number}.{name}"] = value
    for name, p in _parameter_names(models).values():
        known |= {f"optimizers.{i}.state.{name}": p for i in range(len(optimizers))}
    return lambda path: known.get(match(path), known.get(path.rpartition(".")[0]))


def trained_paths(models: Models) -> list[str]:
    """The paths in a saved state of what is trained: parameters, and the statistics of BatchNorm."""
    names = [name for name, p in _parameter_names(models).values() if p.requires_grad]
    for number, model in enumerate(models):
        inner = unwrap(model)
        buffers = [plain_name(inner, name) for name, _ in inner.named_buffers()]
        names += [f"{number}.{n}" for n in buffers if n.endswith(("running_mean", "running_var"))]
    return [f"models.{name}" for name in names]


def _state_of(model: torch.nn.Module) -> dict[str, Any]:
    model = unwrap(model)
    return {plain_name(model, name): value for name, value in model.state_dict().items()}


def _load_model(model: torch.nn.Module, values: Mapping[str, Any]) -> None:
    model = unwrap(model)
    model.load_state_dict(
        {
            name: sharded_like(own, values[plain_name(model, name)])
            for name, own in model.state_dict().items()
        }
    )


def _parameter_names(models: Models) -> _Names:
    names: _Names = {}
    for number, model in enumerate(models):
        model = unwrap(model)
        for name, p in model.named_parameters():
            names.setdefault(id(p), (f"{number}.{plain_name(model, name)}", p))
    return names


def _group_names(optimizer: torch.optim.Optimizer, names: _Names) -> list[list[str]]:
    groups, count = [], 0
    for group in optimizer.param_groups:
        found = []
        for p in group["params"]:
            # A parameter outside of the models is named by its position.
            found.append(names[id(p)][0] if id(p) in names else f"parameter.{count}")
            count += 1
        groups.append(found)
    return groups


def _named(optimizer: torch.optim.Optimizer, names: _Names) -> dict[str, Any]:
    state = optimizer.state_dict()
    grouped = _group_names(optimizer, names)
    flat = list(chain(*grouped))
    return {
        **state,
        "state": {flat[k] if isinstance(k, int) else k: v for k, v in state["state"].items()},
        "param_groups": [
            {**group, "params": own}
            for group, own in zip(state["param_groups"], grouped, strict=True)
        ],
    }


def _check_shapes(model: torch.nn.Module, values: Mapping[str, Any]) -> None:
    own = _state_of(model)
    for name in sorted(set(own) | set(values)):
        ours, theirs = (described(each.get(name)) for each in (own, values))
        if ours != theirs:
            raise CheckpointError(
                f"{name}: the model has {ours}, the checkpoint has {theirs}.",
                fix=_SAME_MODEL,
                parameter=name,
            )
