"""Reads the collectives of this rank: torch's flight recorder, and the queues of `shm` and `mpi`.

Runs in each rank. launch/worker.py loads this file without importing the package `paceline`, so it may import
only the standard library. The private names of torch used here are in `torch_private.NAMES`.
`torch_private.find` would import torch, so they are looked up here, in loaded modules only. Without them
there are no entries; `table` names those that are missing.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable
from typing import Any

_ENTRIES = 64  # latest entries that are reported, besides those that are not completed
_DUMP_NCCL = "torch._C._distributed_c10d._dump_nccl_trace"  # only in builds of torch with NCCL
_DUMP = "torch._C._distributed_c10d._dump_fr_trace"
_WORLD = "torch.distributed.distributed_c10d._world"
# Exists only when torch.distributed is imported to its end, which can take long on a slow disk.
_LAST = "torch.distributed.destroy_process_group"
# How the description of a group of a device mesh begins; the name of the axis follows.
_OF_MESH = "mesh_"
_KEYS = (
    *("profiling_name", "group", "backend", "collective_seq_id", "is_p2p", "input_sizes"),
    *("input_dtypes", "state", "retired", "time_created_ns"),
)


def counts() -> tuple[int, int]:
    """How many operations were entered, and how many of them are completed."""
    entered = completed = 0
    for _, dump in _dumps(entries=False):
        for status in dump.get("pg_status", {}).values():
            entered += max(int(status["last_enqueued_collective"]), 0)
            completed += max(int(status["last_completed_collective"]), 0)
    for _, queue in _our_queues():
        entered += queue.num_issued
        completed += queue.num_issued - queue.num_waiting
    return entered, completed


def table() -> dict[str, Any]:
    """The latest collectives and all that are not completed, oldest first, and the number of the latest
    one of each group and backend; ranks and mesh axes of groups."""
    entries = _entries()
    last_numbers: dict[str, int] = {}
    for entry in entries:  # a send has the number of the collective before it
        last_numbers[f"{entry['group']} {entry['backend']}"] = entry["collective_seq_id"]
    for backend, dump in _dumps(entries=False):
        for name, status in dump.get("pg_status", {}).items():
            # Of a group without entries, because newer ones of other groups have replaced them. With NCCL
            # this is the number of sends, if the latest operation was one.
            last_numbers.setdefault(f"{name} {backend}", int(status["last_enqueued_collective"]))
    for name, queue in _our_queues():
        entries += (entry | {"group": name, "backend": queue.backend} for entry in queue.waiting())
        last_numbers[f"{name} {queue.backend}"] = queue.num_issued
    entries.sort(key=lambda entry: entry["time_created_ns"])
    first = len(entries) - _ENTRIES
    kept = [entry for n, entry in enumerate(entries) if n >= first or not entry.get("retired")]
    return {
        "entries": [{key: entry.get(key) for key in _KEYS} for entry in kept],
        "groups": {
            name: sorted(_loaded(_WORLD).pg_group_ranks.get(group, ()))
            for group, name in _group_names().items()
        },
        "axes": {
            name: group.group_desc.removeprefix(_OF_MESH)
            for group, name in _group_names().items()
            if group.group_desc.startswith(_OF_MESH)
        },
        "last_numbers": last_numbers,
        "missing": [
            path for path in (_DUMP, _WORLD) if _loaded(_LAST) is not None and _loaded(path) is None
        ],
    }


def _entries() -> list[dict[str, Any]]:
    """All entries, with `group` and `backend`; each backend of a group has its own numbers."""
    found = []
    for backend, dump in _dumps(entries=True):
        for entry in dump.get("entries", ()):
            group = entry["process_group"][0]
            if group:  # the Gloo group in a `ShmGroup` has no name
                found.append(entry | {"group": group, "backend": backend})
    return found


def _dumps(*, entries: bool) -> Iterable[tuple[str, dict[str, Any]]]:
    """The flight recorder of each backend that has one."""
    for backend, path in (("nccl", _DUMP_NCCL), ("gloo", _DUMP)):
        if (dump := _loaded(path)) is not None:
            # Without stacks, and not only what is active. As JSON it takes twice as long.
            yield backend, pickle.loads(dump(entries, False, False))


def _loaded(path: str) -> Any:
    """An attribute of a module; None if the module is not loaded or lacks it."""
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def _group_names() -> dict[Any, str]:
    world = _loaded(_WORLD)
    return dict(world.pg_names) if world is not None else {}


def _our_queues() -> Iterable[tuple[str, Any]]:
    """The queue of works of each `shm` and `mpi` group, which the flight recorder does not see, by name."""
    for group, name in _group_names().items():
        queue = getattr(group, "queue", None)  # of a `ShmGroup` or an `MpiGroup`
        if queue is not None:
            yield name, queue
