"""How a model is cut into the stages of a pipeline: at names, or by numbers of parameters.

A unit is the name of a submodule that belongs to one stage as a whole, and a stage is a list of consecutive
units. A cut that cannot be trained is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

import torch
from torch import nn

from paceline import log
from paceline.errors import ConfigError, count_of, listed
from paceline.job.job import Job
from paceline.parallel.modules import enclosing, names_matching, tied_parameters

LOOPED = ("interleaved", "zero_bubble")  # schedules that may have several stages on each rank


def choose_stages(
    job: Job, module: nn.Module, split: str | Sequence[str], schedule: str
) -> list[list[str]]:
    """The stages of a module over the axis `pp` of the job's mesh; see `pipeline`. All ranks call it.

    Raises:
        ConfigError: as `pipeline`.
    """
    ranks = 1 if job.mesh is None else job.mesh.pp
    _refuse_extra_state(module)
    if split == "auto":
        num_stages = ranks * (2 if schedule == "interleaved" and ranks > 1 else 1)
        units = _layers(module)
        _refuse_unowned(module, units)
        _refuse_few(module, units, num_stages)
        stages = _partition(units, [_size(module, unit) for unit in units], num_stages)
    else:
        stages = _named_stages(module, [split] if isinstance(split, str) else list(split))
        _refuse_unowned(module, [unit for units in stages for unit in units])
    _refuse_count(stages, ranks, schedule)
    _refuse_hooks(module, stages)
    _refuse_shared(module, stages)
    _refuse_untrained(module, stages, is_named=split != "auto")
    return stages


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children, also those that are another child of the same module."""
    named = module.named_modules(remove_duplicate=False)
    return [(name, child) for name, child in named if name and "." not in name]


def _layers(module: nn.Module, prefix: str = "") -> list[str]:
    """The units without names: children with parameters or buffers, and those of containers."""
    found: list[str] = []
    for name, child in _children(module):
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            found += _layers(child, f"{prefix}{name}.")
        elif child.state_dict():
            found.append(f"{prefix}{name}")
    return found


def _named_stages(module: nn.Module, split: list[str]) -> list[list[str]]:
    """Stages that begin with the names of `split`: submodules around those are taken apart."""
    for name in split:
        names_matching(module, name, option="split", remove_duplicate=False)

    def expand(parent: nn.Module, prefix: str) -> Iterator[str]:
        for name, child in _children(parent):
            path = f"{prefix}{name}"
            # Nothing can take the place of a ModuleList or a ModuleDict, which `forward` does not call.
            is_called = type(child).forward is not nn.Module.forward
            if not is_called or any(each.startswith(f"{path}.") for each in split):
                yield from expand(child, f"{path}.")
            elif child.state_dict():
                yield path

    units = list(expand(module, ""))
    for name in split:
        if name not in units:
            meant = [u for u in units if fnmatchcase(u, name) or u.startswith(f"{name}.")] or units
            raise ConfigError(
                f"split: {name!r} is not the name of a submodule that can begin a stage.",
                why="a stage begins with one submodule, which has parameters or buffers and which `forward` "
                "calls.",
                fix=f"choose from {listed(meant)}.",
            )
    order = [unit for unit in units if unit in split]
    if order != split:
        raise ConfigError(
            f"split: {split} must name different submodules with parameters, in the order of the model.",
            fix=f"split={order}.",
        )
    stages: list[list[str]] = [[]]
    for unit in units:
        if unit in split:
            stages.append([])
        stages[-1].append(unit)
    return stages


def _size(module: nn.Module, unit: str) -> int:
    return sum(p.numel() for p in module.get_submodule(unit).parameters())


def _refuse_few(module: nn.Module, units: list[str], num_stages: int) -> None:
    if len(units) < num_stages:
        raise ConfigError(
            f"{type(module).__name__} has {count_of(len(units), 'layer')} with parameters, too few for "
            f"{num_stages} stages.",
            fix="use a smaller pp, or give split= with names of inner submodules.",
        )


def _partition(units: list[str], sizes: Sequence[int], num_stages: int) -> list[list[str]]:
    """`num_stages` stages of consecutive units, so that the largest one is as small as possible."""
    totals = list(accumulate(sizes, initial=0))
    # By numbers of stages and units: the largest size, the sum of squares, and where the last stage begins.
    best: dict[tuple[int, int], tuple[int, int, int]] = {(0, 0): (0, 0, 0)}
    for count in range(1, num_stages + 1):
        for end in range(count, len(units) + 1):
            candidates = []
            for begin in range(count - 1, end):
                if (count - 1, begin) in best:
                    largest, squares, _ = best[count - 1, begin]
                    size = totals[end] - totals[begin]
                    candidates.append((max(largest, size), squares + size**2, begin))
            best[count, end] = min(candidates)
    stages, end = [], len(units)
    for count in range(num_stages, 0, -1):
        begin = best[count, end][2]
        stages.append(units[begin:end])
        end = begin
    return stages[::-1]


def _refuse_count(stages: list[list[str]], ranks: int, schedule: str) -> None:
    num_stages = len(stages)
    is_multiple = num_stages % ranks == 0
    if ranks == 1 or num_stages == ranks or (schedule in LOOPED and is_multiple):
        return
    fits = f"a multiple of {ranks}" if schedule in LOOPED else f"{ranks}"
    fix = f"give {count_of(ranks - 1, 'name')}, or change pp."
    if schedule in LOOPED:
        fix = f"give {ranks - 1}, {2 * ranks - 1}, ... names, or change pp."
    elif is_multiple:
        fix += " schedule='interleaved' has several stages on a rank."
    raise ConfigError(
        f"split makes {num_stages} stages; pp={ranks} with schedule={schedule!r} needs {fits}.",
        fix=fix,
    )


def _refuse_extra_state(module: nn.Module) -> None:
    state = module.state_dict()
    if others := [name for name, value in state.items() if not isinstance(value, torch.Tensor)]:
        raise ConfigError(
            f"the state_dict() of {type(module).__name__} holds other values than tensors: {listed(others)}.",
            why="stages exchange and save tensors only.",
            fix="keep what get_extra_state() returns in a buffer (register_buffer).",
        )


def _refuse_hooks(module: nn.Module, stages: list[list[str]]) -> None:
    """Refuse hooks on a module that is cut: no stage runs its whole forward."""
    inside = {unit[:at] for units in stages for unit in units for at in range(len(unit))}
    for name, each in module.named_modules():
        hooks = (each._forward_hooks, each._forward_pre_hooks, each._backward_hooks)
        if f"{name}." in inside and any(hooks):
            raise ConfigError(
                f"{name} has hooks, and its layers belong to several stages.",
                why="no stage runs its whole forward.",
                fix="register the hooks on its layers, or split at other names.",
            )


def _refuse_unowned(module: nn.Module, units: Sequence[str]) -> None:
    for name, _ in module.named_parameters(remove_duplicate=False):
        if not enclosing(name, units):
            raise ConfigError(
                f"{name} is held by {name.rpartition('.')[0] or 'the model itself'}, not by a layer, so it "
                "belongs to no stage.",
                fix="move it into the submodule that uses it.",
                parameters=[name],
            )


def _refuse_shared(module: nn.Module, stages: list[list[str]]) -> None:
    stage_of = {unit: stage for stage, units in enumerate(stages) for unit in units}
    for first, *others in tied_parameters(module):
        for name in others:
            stage, other = (stage_of[enclosing(each, stage_of)] for each in (first, name))
            if stage != other:
                raise ConfigError(
                    f"{first} and {name} are one parameter (tied weights, or one module under two names), "
                    f"but belong to stages {stage} and {other}.",
                    why="each stage is on another rank and would train its own copy.",
                    fix="untie them, or split so that one stage has both.",
                    parameters=[first, name],
                )


def _refuse_untrained(module: nn.Module, stages: list[list[str]], *, is_named: bool) -> None:
    choose = "choose other names for split" if is_named else "give split= with names of submodules"
    for stage, units in enumerate(stages):
        parameters = [p for unit in units for p in module.get_submodule(unit).parameters()]
        if len(stages) > 1 and not any(p.requires_grad for p in parameters):
            raise ConfigError(
                f"stage {stage} ({', '.join(units) or 'empty'}) has no trainable parameter.",
                fix=f"{choose}, so that each stage has one.",
            )


def log_stages(module: nn.Module, stages: list[list[str]], schedule: str) -> None:
    shown = []
    for stage, units in enumerate(stages):
        size = sum(_size(module, unit) for unit in units)
        names = units[0] if len(units) == 1 else f"{units[0]} to {units[-1]}"
        shown.append(f"{stage}: {names} ({size:,} parameters)")
    log.logger.info("pipeline (%s): stage %s.", schedule, "; ".join(shown))
