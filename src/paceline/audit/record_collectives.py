"""Records the collectives that the script calls: name, line, arguments, result."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.join import Join

from paceline.audit.progress import Progress
from paceline.audit.record import leaves, user_line

# Sends and receives are not in this list: not every rank of the group calls them.
_COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "barrier",
    "monitored_barrier",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
)
_MAX_VALUES = 16


def install(progress: Progress) -> None:
    """Record the collectives of torch.distributed."""
    hooks = _Hooks(progress)
    for name in _COLLECTIVES:
        original = getattr(c10d, name)
        watched = hooks.wrap_collective(name, original)
        setattr(c10d, name, watched)
        setattr(dist, name, watched)
    initialise = hooks.wrap_init_process_group(c10d.init_process_group)
    c10d.init_process_group = dist.init_process_group = initialise
    enter = Join.__enter__

    def entering(join: Join) -> Any:
        progress.recorder.write("join", at=user_line())
        return enter(join)  # type: ignore[no-untyped-call]

    Join.__enter__ = entering  # type: ignore[method-assign]


class _Hooks:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._recorder = progress.recorder
        self._inside = False

    def wrap_collective(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(call)

        @functools.wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            given = signature.bind_partial(*args, **kwargs).arguments
            first = next(iter(given.values()), None)
            tensors = [x for x in leaves(first) if isinstance(x, torch.Tensor)]
            self._inside = True
            try:
                with self._recorder.span(
                    "collective",
                    op=name,
                    at=user_line(),
                    s=self._progress.steps,
                    evaluation=self._progress.evaluation,
                    group=_ranks(given.get("group")),
                    reduce=str(given.get("op", "SUM")).rsplit(".", 1)[-1],
                    shape=list(tensors[0].shape) if tensors else [],
                    items=_items(given.get("obj")),
                    values=_values([given["tensor"]] if "tensor" in given else []),
                ) as found:
                    result = call(*args, **kwargs)
                    if not isinstance(result, dist.Work):
                        found["values"] = _values(tensors)
                return result
            finally:
                self._inside = False

        return watched

    def wrap_init_process_group(self, initialise: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(initialise)
        def watched(*args: Any, **kwargs: Any) -> Any:
            backend = args[0] if args else kwargs.get("backend")
            self._recorder.write("init", at=user_line(), backend=backend)
            return initialise(*args, **kwargs)

        return watched


def _ranks(group: Any) -> list[int]:
    """The ranks of a group; empty if this rank is not in it, or no group exists yet."""
    if not dist.is_initialized() or group == dist.GroupMember.NON_GROUP_MEMBER:
        return []
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def _items(value: Any) -> int:
    """How many numbers and texts an object contains."""
    return sum(x.numel() if isinstance(x, torch.Tensor) else 1 for x in leaves(value))


def _values(tensors: list[Any]) -> list[float] | None:
    """The numbers in small tensors; None if a tensor is too large to be a metric."""
    numbers: list[float] = []
    for tensor in tensors:
        if tensor.numel() > _MAX_VALUES or tensor.is_complex():
            return None
        numbers += [float(x) for x in tensor.detach().reshape(-1).tolist()]
    return numbers
