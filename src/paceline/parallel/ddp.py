"""Replicas whose gradients are averaged: a front to `torch.nn.parallel.DistributedDataParallel`.

Adds what torch leaves to its users: errors with parameter names before training instead of indices or a
hang during it, a bucket layout that is the same in a resumed run, and a part in the reduction for a rank
that has no samples. It deliberately does not reduce gradients itself, does not weigh them (the training
loop does, by a factor on the loss), and moves no module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline import log
from paceline.errors import ConfigError, GradientError
from paceline.job.job import Job
from paceline.parallel import reducer
from paceline.parallel.buffers import equalize_buffers
from paceline.parallel.preflight import agree_on_parameters, listed, refuse_module

DEFAULT_BUCKET_MB = 25.0


def ddp(
    job: Job,
    module: nn.Module,
    *,
    bucket_mb: float | Literal["auto"] = DEFAULT_BUCKET_MB,
    static_graph: bool = False,
    find_unused: bool = False,
) -> nn.Module:
    """Wrap `module` so that its gradients are averaged over the ranks; weights become rank 0's.

    In a job of one process the module itself is returned. Otherwise the result is torch's own wrapper:
    gradients are views into its buckets, and the bucket layout is final at once, so that a resumed run
    sums in the same order as an uninterrupted one.

    Args:
        bucket_mb: Size of a gradient bucket in MiB; at the default the first one is 1 MiB. "auto" has
            `Training` try several in its first steps, and checkpoints keep what was fastest. Over Gloo
            and NCCL another size means another order of sums at 3 and more ranks, so other last bits.
        static_graph: Promise that all steps use the same parameters in the same way. torch then lays
            its buckets out in the second step, so resuming at 3 and more ranks is exact to rounding
            only.
        find_unused: Search each forward for parameters that it does not use. Slower.

    Raises:
        ConfigError: no trainable parameter; a parameter on another device than the job's, or not
            initialised; an option that is out of range or would have no effect; wrapped already.
        RankDisagreement: the ranks' parameters or options differ; names the first that does.

    Collective: all ranks, once for each model, same order.
    """
    _refuse_options(bucket_mb, static_graph, find_unused)
    if is_ddp(module):
        raise ConfigError("this module is wrapped by DDP already.", fix="call paceline.ddp once.")
    refuse_module(job, module)
    if job.group is None:
        return module
    settings = f"{bucket_mb=}, {static_graph=}, {find_unused=}"
    agree_on_parameters(job, module, settings)
    try:
        wrapper = reducer.wrap(
            job,
            module,
            bucket_mb=None if bucket_mb in ("auto", DEFAULT_BUCKET_MB) else float(bucket_mb),
            tuned=bucket_mb == "auto",
            static_graph=static_graph,
            find_unused=find_unused,
        )
    except RuntimeError as error:
        job.reraise(error)
    equalize_buffers(job, wrapper)
    return wrapper


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside torch's DDP and `torch.compile`, or `model` itself if in neither.

    Collective: none.
    """
    name = "module" if isinstance(model, DistributedDataParallel) else "_orig_mod"
    inner = model._modules.get(name)
    return model if inner is None else unwrap(inner)


def is_ddp(model: nn.Module) -> bool:
    """Whether `model` is torch's DDP, compiled or not."""
    return reducer.find_wrapper(model) is not None


def check_parameters(
    job: Job, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Refuse parameters that would be trained on each rank alone; warn of those never trained.

    Raises:
        GradientError: parameters that DDP does not know, or waits for in vain (`parameters`).
    """
    wrapper = reducer.find_wrapper(model)
    named = {id(p): name for name, p in unwrap(model).named_parameters()}
    owned = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    if job.group is not None:
        known = (
            () if wrapper is None else reducer.known_parameters(wrapper)
        )  # and one of `wrappers`
        # An optimizer may own parameters of several models, each wrapped by itself.
        fine = {id(p) for each in reducer.wrappers for p in reducer.handled_parameters(each)}
        trainable = {id(p): p for p in [*unwrap(model).parameters(), *owned] if p.requires_grad}
        loose = [
            named.get(key, f"a parameter of shape {list(p.shape)} that is in the optimizer only")
            for key, p in trainable.items()
            if key not in fine
        ]
        if loose:
            raise _loose_error(job, loose, wrapped=wrapper is not None)
        frozen = [name for name, p in known if not p.requires_grad]
        if frozen:
            raise GradientError(
                f"frozen after they were wrapped by DDP: {listed(frozen)}.",
                where=job.where(),
                why="DDP waits for the gradient of each parameter that could be trained then.",
                fix="call requires_grad_(False) before paceline.ddp(...).",
                parameters=frozen,
            )
    ids = {id(p) for p in owned}
    idle = [n for n, p in unwrap(model).named_parameters() if p.requires_grad and id(p) not in ids]
    if idle and optimizers:
        log.once(
            f"no optimizer owns {listed(idle)}: trainable, but it stays as it is. "
            "Give it to an optimizer, or freeze it with requires_grad_(False) before ddp(...)."
        )


def _loose_error(job: Job, names: list[str], *, wrapped: bool) -> GradientError:
    if wrapped:
        why = "added or unfrozen after the model was wrapped, or in the optimizer but not in the model."
        fix = "call paceline.ddp(...) when all parameters are in the model and unfrozen."
    else:
        why = "the model is not wrapped, so each rank would train a model of its own."
        fix = "model = paceline.ddp(job, model)."
    return GradientError(
        f"DDP does not know {listed(names)}: the gradients would differ over ranks.",
        where=job.where(),
        why=why,
        fix=fix,
        parameters=names,
    )


def unused_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters that DDP waits for and that have no gradient; [] for a plain module.

    To be asked after the step's last backward and before gradients are set to None.
    """
    wrapper = reducer.find_wrapper(model)
    return (
        []
        if wrapper is None
        else [name for name, p in reducer.known_parameters(wrapper) if p.grad is None]
    )


def refuse_unused(job: Job, model: nn.Module, *, direct: bool = False) -> None:
    """Raise if the step's reduction cannot finish, because this rank did not use some parameters.

    torch says so in the next forward, with indices, or not at all where other ranks already wait.
    About a microsecond where all is well, so it may be called after every step's last backward.

    Args:
        direct: Whether the reduction is not DDP's and has not begun.

    Raises:
        GradientError: names them (`parameters`); torch's own error, if any, is its cause.
    """
    wrapper = reducer.find_wrapper(model)
    if wrapper is None:
        return
    cause: RuntimeError | None = None
    try:
        wrapper.reducer._check_reducer_finalized()
    except RuntimeError as error:
        cause = error
    lenient = wrapper.find_unused_parameters or wrapper.static_graph
    # A finished reduction leaves a gradient everywhere; none at all means that it never began.
    finished = lenient or reducer.known_parameters(wrapper)[0][1].grad is not None
    if cause is None and finished and not direct:
        return
    names = unused_parameters(wrapper)
    if direct and not names:
        return
    if names:
        what = f"no gradient reached {listed(names)}"
    else:
        what = "the last backward of the step did not use all parameters that earlier ones used"
    raise GradientError(
        f"{what}.",
        where=job.where(),
        why="DDP waits for the gradient of each trainable parameter in the step's last backward.",
        fix="freeze what is never used with requires_grad_(False) before ddp(...), or "
        + ("leave static_graph out." if wrapper.static_graph else "ddp(..., find_unused=True)."),
        parameters=names,
    ) from cause


def _refuse_options(
    bucket_mb: float | Literal["auto"], static_graph: bool, find_unused: bool
) -> None:
    if bucket_mb != "auto" and not (isinstance(bucket_mb, int | float) and bucket_mb > 0):
        raise ConfigError(f"bucket_mb must be 'auto' or more than 0, got {bucket_mb!r}.")
    if static_graph and find_unused:
        raise ConfigError(
            "find_unused has no effect with static_graph, which finds unused parameters itself.",
            fix="leave one of them out.",
        )
