"""In-place recovery: the ranks that are left keep their processes when another rank fails.

`paceline run --recover in-place` starts a process in place of one that has failed, and announces a new
generation of connections to all ranks. A rank whose collective broke closes its process groups, waits for the
announcement, and connects to the others of the new generation (`Job.reconnect`).

The new process runs the script from the beginning, and the others do not take part. So it starts with process
groups that refuse every collective (`ReplacementGroup`), and an exchange in which all ranks give its own
values (`ReplacementExchange`). When its training begins, it connects to the others and gets their state.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from paceline.errors import StepError
from paceline.job.exchange import Exchange

NAME = "paceline_replacement"
# The generation that a process begins with: 0 for all ranks that the launcher starts together.
_VARIABLE = "PACELINE_GENERATION"
SET_UP = "set up"  # the name of calls before a training, in which all ranks give equal values
GIVEN_UP = -1  # is announced when all ranks have to end
_POLL_S = 0.002

# The generations that the launcher has announced. A thread of the rank's first code adds to it.
announced: set[int] = set()
# How many trainings this process has begun. A new process connects to the others in its first one.
num_trainings = 0


def is_on(environ: Mapping[str, str]) -> bool:
    """Whether the launcher replaces single ranks."""
    return _VARIABLE in environ


def first_generation(environ: Mapping[str, str]) -> int:
    """The generation in which this process takes part first; 0 unless it replaces another."""
    return int(environ.get(_VARIABLE, 0))


def tell_launcher(event: str, *, step: int = 0, generation: int = 0) -> bool:
    """Send an event without an error to `paceline run`; False if that is not possible."""
    worker = sys.modules.get("paceline.launch.worker")
    return worker is not None and worker.report(event, step=step, generation=generation)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error was raised because another rank was lost, in a rank of `paceline run`."""
    worker = sys.modules.get("paceline.launch.worker")
    return worker is not None and worker.is_lost_peer(error)


def await_announcement(generation: int, cause: BaseException) -> None:
    """Wait until the launcher announces this generation.

    Raises:
        BaseException: `cause`: the launcher has given up.
    """
    while generation not in announced:
        if GIVEN_UP in announced:
            raise cause
        time.sleep(_POLL_S)


def await_ranks(store: dist.Store, rank: int, world_size: int, cause: BaseException) -> None:
    """Wait until all ranks have come to this generation.

    Raises:
        BaseException: `cause`: the launcher has given up.
    """
    keys = [f"came/{each}" for each in range(world_size)]
    store.set(keys[rank], "")
    while not store.check(keys):
        if GIVEN_UP in announced:
            raise cause
        time.sleep(_POLL_S)


class ReplacementGroup(dist.ProcessGroup):
    """The process group of a rank whose peers are in their training. Collectives raise a StepError."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg] # the constructor for subclasses

    def getBackendName(self) -> str:
        return NAME

    def _refuse(self, *args: Any, **options: Any) -> Any:
        raise needs_all_ranks("a collective")

    allreduce = allreduce_coalesced = reduce = broadcast = barrier = _refuse
    allgather = all_gather_single = all_gather_single_coalesced = _allgather_base = _refuse
    allgather_into_tensor_coalesced = allgather_coalesced = gather = scatter = _refuse
    reduce_scatter = reduce_scatter_single = reduce_scatter_single_coalesced = _refuse
    _reduce_scatter_base = reduce_scatter_tensor_coalesced = _refuse
    alltoall = alltoall_base = all_to_all_single = send = recv = recv_anysource = _refuse


def _create(store: Any, rank: int, size: int, timeout: Any) -> ReplacementGroup:
    return ReplacementGroup(rank, size)


def register() -> None:
    """Register the backend of `ReplacementGroup` with torch.distributed in this process."""
    if not dist.is_backend_available(NAME):
        dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])


class ReplacementExchange(Exchange):
    """Answers with this rank's own values for all ranks. What they would tell it comes with their state."""

    def __init__(self, size: int) -> None:
        self._size = size

    def gather_bytes(
        self, call: str, body: bytes, *, fix: str = "", has_timeout: bool = True
    ) -> list[bytes]:
        # Checks that all ranks have passed already with equal values. The values of other calls differ.
        if not call.startswith(("agree(", SET_UP)):
            raise needs_all_ranks(f"`{call}`")
        return [body] * self._size

    def close(self) -> None:
        """There is no thread."""


def needs_all_ranks(what: str) -> StepError:
    """The error if a process that replaces a failed one needs the other ranks before its training begins."""
    return StepError(
        f"the script needs {what} before its training begins, and the other ranks are in theirs.",
        why="this process replaces one that has failed (`paceline run --recover in-place`).",
        fix="nothing: all ranks are started again. Without --recover that happens at once.",
    )
