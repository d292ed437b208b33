"""Programs of collectives, whose results on a backend are compared with those on Gloo."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist

from paceline.job.job import Job
from paceline.mpi.group import MpiGroup
from paceline.shm.group import ShmGroup

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES += [torch.int64, torch.int32, torch.uint8]
OPS = ["SUM", "PRODUCT", "MIN", "MAX"]
NATIVE = ["all_reduce", "coalesced", "broadcast", "all_gather", "all_gather_single"]
NATIVE += ["reduce_scatter_single", "barrier"]
KINDS = [*NATIVE, "reduce_scatter", "reduce", "gather", "scatter", "all_to_all"]
KINDS += ["all_to_all_single", "uneven"]
# Operations that read strided tensors correctly; Gloo reads wrong elements.
STRIDED = {"shm": NATIVE, "mpi4py": NATIVE, "gloo": []}
CLASSES = {"shm": ShmGroup, "mpi4py": MpiGroup, "gloo": dist.ProcessGroup}
LAYOUTS = ["whole", "transposed", "strided", "scalar"]
SIZES = [0, 1, 2, 7, 31, 64, 1000, 20_000, 300_001]
Call = tuple[str, torch.dtype, int, str, int, str, int]


def every_call(layout: str) -> list[Call]:
    """Each operation with several dtypes and sizes, in the group of all ranks."""
    return [
        (kind, dtype, numel, OPS[n % 4], n % 4, layout, 0)
        for kind in KINDS
        for n, (dtype, numel) in enumerate(
            [(torch.float32, 300_001), (torch.bfloat16, 999), (torch.int32, 0), (torch.uint8, 17)]
        )
    ]


def random_calls(seed: int) -> list[Call]:
    """Operation, dtype, elements, reduction, root, layout and group."""
    draw = random.Random(seed)
    choices = (KINDS, DTYPES, SIZES, OPS, range(4), LAYOUTS, range(3))
    return [tuple(map(draw.choice, choices)) for _ in range(draw.randint(1, 25))]  # type: ignore[misc]


def _make(numel: int, dtype: torch.dtype, layout: str, seed: int) -> torch.Tensor:
    """Small whole numbers, whose sums and products are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    if layout == "scalar":
        numel = 1
    values = torch.randint(-2 if dtype != torch.uint8 else 0, 3, (numel,), generator=generator)
    values = values.to(dtype)
    if layout == "scalar":
        return values.reshape(())
    if layout == "transposed" and numel % 2 == 0:
        return values.view(2, -1).t()
    if layout == "strided":
        return values.repeat_interleave(2)[::2]
    return values


def _call(
    call: tuple[Any, ...], group: Any, number: int, *, later: bool
) -> tuple[list[torch.Tensor], Any]:
    """Issue one operation. Returns the tensors that it changes, and its work."""
    if call[5] == "strided" and call[0] not in STRIDED[dist.get_backend(group)]:
        call = (*call[:5], "whole", *call[6:])  # Gloo ignores the strides and reads wrong elements
    kind, dtype, numel, op_name, root, layout, _ = call
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    op = getattr(dist.ReduceOp, op_name)
    root = dist.get_global_rank(group, root % size)
    options: dict[str, Any] = {"group": group, "async_op": later}
    seed = 1000 * number + rank
    mine = _make(numel, dtype, layout, seed)
    many = [_make(numel, dtype, layout, seed + 100 * r) for r in range(size)]
    at_root = dist.get_rank() == root
    flat = _make(numel, dtype, "whole", seed)
    wide = torch.cat([flat + r for r in range(size)])
    if kind == "barrier":
        return [], dist.barrier(**options)
    if kind == "all_reduce":
        return [mine], dist.all_reduce(mine, op, **options)
    if kind == "coalesced":  # Gloo supports one layout only
        many = [_make(numel, dtype, "whole", seed + r) for r in range(size)]
        return many, dist.all_reduce_coalesced(many, op, **options)
    if kind == "broadcast":
        return [mine], dist.broadcast(mine, root, **options)
    if kind == "reduce":
        return [mine] if at_root else [], dist.reduce(mine, root, op, **options)
    if kind == "all_gather":
        return many, dist.all_gather(many, mine, **options)
    if kind == "all_gather_single":
        return [wide], dist.all_gather_into_tensor(wide, flat, **options)
    if kind == "gather":
        to = many if at_root else None
        return to or [], dist.gather(mine, to, root, **options)
    if kind == "scatter":
        return [mine], dist.scatter(mine, many if at_root else None, root, **options)
    if kind == "reduce_scatter":
        return [mine], dist.reduce_scatter(mine, many, op, **options)
    if kind == "reduce_scatter_single":
        return [flat], dist.reduce_scatter_tensor(flat, wide, op, **options)
    if kind == "all_to_all":
        if torch.__version__ < "2.12":  # Gloo lacks it
            given = torch.stack(many)
            taken = torch.zeros_like(given)
            return [*taken], dist.all_to_all_single(taken, given, **options)
        out = [torch.zeros_like(t) for t in many]
        return out, dist.all_to_all(out, many, **options)
    if kind == "all_to_all_single":
        out = [torch.zeros_like(wide)]
        return out, dist.all_to_all_single(out[0], wide, **options)
    gives = [(rank + 2 * r) % 5 for r in range(size)]
    takes = [(r + 2 * rank) % 5 for r in range(size)]
    rows = _make(3 * sum(gives), dtype, "whole", seed).view(-1, 3)
    out = [torch.zeros(sum(takes), 3, dtype=dtype)]
    return out, dist.all_to_all_single(out[0], rows, takes, gives, **options)


def _run(job: Job, calls: list[Call], backend: str, *, later: bool) -> list[list[torch.Tensor]]:
    """The results of the calls. `later` waits for all works at the end, the last issued first."""
    # All ranks; all but the last; the last and the first. Created in this order on all ranks.
    members = [None, list(range(job.world_size - 1)), [0, job.world_size - 1]]
    groups: list[Any] = [dist.new_group(ranks, backend=backend) for ranks in members]
    order = list(enumerate(calls))
    if later:
        # Ranks use their groups in different orders; within one group the order is the same.
        order.sort(key=lambda item: (item[1][6] + job.rank) % 3)
    results: list[list[torch.Tensor]] = [[] for _ in calls]
    works = []
    for number, call in order:
        group = groups[call[6]]
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            results[number], work = _call(call, group, number, later=later)
            works.append(work)
    for work in reversed(works):
        if work is not None:
            work.wait()
    dist.barrier(group=job.control)
    for group in groups:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            size = dist.get_world_size(group)
            expected = CLASSES[backend] if size > 1 else dist.ProcessGroup
            assert type(group) is expected
            dist.destroy_process_group(group)
    return results


def differences(job: Job, calls: list[Call], backend: str, *, later: bool) -> list[str]:
    """The calls whose results differ between a backend and Gloo."""
    own = _run(job, calls, backend, later=later)
    gloo = _run(job, calls, "gloo", later=False)
    return [
        f"{number}: {call}"
        for number, call in enumerate(calls)
        if not all(map(torch.equal, own[number], gloo[number]))
    ]
