"""`GroupOverGloo`: a process group in Python that leaves to a Gloo group what it does not do itself.

The base of the backends `shm` and `mpi`. They run the collectives of DDP, FSDP, DTensor and evaluations:
all-reduce, broadcast, all-gather, reduce-scatter of one tensor, barrier. Gloo runs all others, and these for
tensors and reductions that the backend does not have. The choice depends only on the operation, the device,
the layout and the dtype, so all ranks make the same choice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline import torch_private
from paceline.shm.queued_work import Queue
from paceline.shm.tensors import Tensors

_GLOO = dist.ProcessGroup.BackendType.GLOO
_CLASS = "torch.distributed.ProcessGroup"
_SET_DEFAULT, _REGISTER = f"{_CLASS}._set_default_backend", f"{_CLASS}._register_backend"
_SET_SEQUENCE_NUMBER = "torch.distributed.ProcessGroupGloo._set_sequence_number_for_group"
# Names in torch before 2.13. The private ones are also in `torch_private.NAMES`.
_OLD_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
# What the queue of a backend runs, and the outputs; None for Gloo.
Plan = tuple[Any, Tensors] | None


def can_hold_gloo() -> bool:
    """Whether the installed torch lets a process group in Python hold a Gloo group."""
    return None not in map(torch_private.find, (_SET_DEFAULT, _REGISTER))


def make_gloo(options: Any) -> dist.ProcessGroupGloo:
    """A Gloo group of the ranks that torch's options for a backend name. All of them must call it."""
    store = dist.PrefixStore("gloo", options.store)
    gloo = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, options.timeout)
    if set_sequence_number := torch_private.find(_SET_SEQUENCE_NUMBER):
        set_sequence_number(gloo)
    return gloo


def native(plan: Callable[..., Plan]) -> Any:
    """Make an operation of the group from a method that plans it.

    The method returns what the queue has to run and the outputs, or None if Gloo must do the call. Gloo also
    does calls in torch's short forms without options, such as `group.allreduce(tensor)`.
    """
    name = plan.__name__

    @functools.wraps(plan)
    def operation(self: GroupOverGloo, *args: Any, **options: Any) -> Any:
        opts: Any = options.get("opts") or (args[-1] if args else None)
        planned = plan(self, *args, **options) if hasattr(opts, "asyncOp") else None
        if planned is None:
            return self.gloo_operation(name)(*args, **options)
        to_run, outputs = planned
        timeout_s = opts.timeout.total_seconds()
        return self.queue.submit(
            to_run,
            outputs,
            timeout_s if timeout_s > 0 else self.timeout_s,
            blocking=not opts.asyncOp,
        )

    operation.plan = plan  # type: ignore[attr-defined]
    return operation


def by_gloo(name: str) -> Any:
    """An operation of the group that Gloo does."""

    def operation(self: GroupOverGloo, *args: Any, **options: Any) -> Any:
        return self.gloo_operation(name)(*args, **options)

    return operation


class GroupOverGloo(dist.ProcessGroup):
    """A process group in Python (see torch's `PyProcessGroup.hpp`) that holds a Gloo group of the same ranks.

    All its ranks call all operations in the same order.

    Attributes:
        queue: the unfinished operations that Gloo does not run.
        timeout_s: the timeout of operations without one of their own.
    """

    queue: Queue[Any]

    def __init__(self, options: Any, gloo: dist.ProcessGroupGloo) -> None:
        self._rank, self._size = options.group_rank, options.group_size
        super().__init__(self._rank, self._size)  # type: ignore[call-arg] # the constructor for subclasses
        # Gloo's operations are called through another object: those of `self` would call the methods below.
        self._gloo = dist.ProcessGroup(options.store, self._rank, self._size)
        set_default: Any = torch_private.find(_SET_DEFAULT)  # `can_hold_gloo` has found both
        register_backend: Any = torch_private.find(_REGISTER)
        for group in (self, self._gloo):
            set_default(group, _GLOO)
            for device in ("cpu", "cuda"):
                register_backend(group, torch.device(device), _GLOO, gloo)
        self.timeout_s = options.timeout.total_seconds()

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self.timeout_s = timeout.total_seconds()

    def gloo_operation(self, name: str) -> Callable[..., Any]:
        """An operation of the Gloo group, under the name that the installed torch has for it."""
        found: Callable[..., Any] = getattr(self._gloo, name, None) or getattr(
            self._gloo, _OLD_NAMES[name]
        )
        return found

    # C++ callers (functional collectives, DTensor) look up operations by the old or the new name, and use the
    # coalesced ones. If they find none, torch runs Gloo's operation while it holds the interpreter lock,
    # which can deadlock with a thread of Gloo.
    reduce = by_gloo("reduce")
    reduce_scatter = by_gloo("reduce_scatter")
    gather = by_gloo("gather")
    scatter = by_gloo("scatter")
    alltoall = by_gloo("alltoall")
    all_to_all_single = alltoall_base = by_gloo("all_to_all_single")
