"""Records the collectives that the script calls: name, line, arguments, result."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.join import Join

from paceline.audit import saved_weights
from paceline.audit.digests import leaves
from paceline.audit.evaluations import MAX_METRIC_VALUES, MAX_SUMS
from paceline.audit.events import CollectiveBegun, CollectiveEnded, JoinEntered, TensorsSent
from paceline.audit.progress import Progress
from paceline.audit.record import Nesting, intercept, user_line

# Not every rank of the group calls these.
_SENDS = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
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


def install(progress: Progress) -> None:
    """Record the collectives of torch.distributed."""
    hooks = CollectiveHooks(progress)
    for name in _COLLECTIVES:
        intercept(name, hooks.collective, c10d, dist)
    for name in _SENDS:
        intercept(name, hooks.send, c10d, dist)
    intercept("__enter__", hooks.enter_join, Join)


class CollectiveHooks:
    """What a rank does in collectives."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._recorder = progress.recorder
        self._nesting = Nesting()
        self._sends = False  # whether the rank has sent or received a tensor

    def send(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._sends:
            self._sends = True
            self._recorder.write(TensorsSent())
        return call(*args, **kwargs)

    def collective(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            # Such as that of an asynchronous save: it has no fixed place among the events of the loop.
            return call(*args, **kwargs)
        with self._nesting as is_outermost:
            if not is_outermost:
                return call(*args, **kwargs)
            op = call.__name__
            if self._progress.evaluation is not None and ("reduce" in op or "gather" in op):
                saved_weights.save_weights(self._progress)
            given = inspect.signature(call).bind_partial(*args, **kwargs).arguments
            first = next(iter(given.values()), None)
            tensors = [x for x in leaves(first) if isinstance(x, torch.Tensor)]
            evaluates = self._progress.evaluation is not None
            most = MAX_SUMS if evaluates and "gather" not in op else MAX_METRIC_VALUES
            begun = CollectiveBegun(
                op=op,
                at=user_line(),
                steps_done=self._progress.steps,
                evaluation=self._progress.evaluation,
                group=_ranks(given.get("group")),
                reduce=str(given.get("op", "SUM")).rsplit(".", 1)[-1],
                values=_values([given["tensor"]] if "tensor" in given else [], most),
            )
            with self._recorder.span(begun, CollectiveEnded) as found:
                result = call(*args, **kwargs)
                if not isinstance(result, dist.Work):
                    found["values"] = _values(tensors, most)
            return result

    def enter_join(self, enter: Callable[..., Any], join: Join) -> Any:
        self._recorder.write(JoinEntered(at=user_line()))
        return enter(join)


def _ranks(group: Any) -> list[int]:
    """The ranks of a group; empty if this rank is not in it, or no group exists yet."""
    if not dist.is_initialized() or group == dist.GroupMember.NON_GROUP_MEMBER:
        return []
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def _values(tensors: list[Any], most: int) -> list[float] | None:
    """The numbers in tensors; None if one has more than `most`, which is too large for a metric."""
    numbers: list[float] = []
    for tensor in tensors:
        if tensor.numel() > most or tensor.is_complex():
            return None
        numbers += [float(x) for x in tensor.detach().reshape(-1).tolist()]
    return numbers
