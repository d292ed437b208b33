"""Check that all ranks hold the same weights and optimizer state, bit for bit; names the ranks that differ.

Buffers and random generators are compared only if requested: BatchNorm buffers and the generator of dropout
differ by design.

Each tensor of a rank becomes one number: sums of its bytes as 64-bit integers, weighed by their place, so
that rows that change places are seen. The sums wrap, and do not depend on the order of addition. Ranks
compare one number for all tensors. Only if it differs do they compare one for each tensor. Whole tensors are
compared along the data axis; parts of sharded tensors along the axis `dp_replicate`, whose ranks hold the
same parts. Parameters that DDP ignores are not compared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from paceline.errors import RankDisagreement, name_ranks
from paceline.job import collectives
from paceline.job.arguments import require_integers
from paceline.job.job import Job
from paceline.parallel.modules import DILOCO, is_sharded, local, unwrap
from paceline.training.optimizers import TrainedOptimizer

_FIRST_STEPS = 10  # weights that differ from the start are found after so many steps
_WORD_BYTES = 8
_COLUMNS = 1024  # words in a row of the grid whose rows and columns are summed
_ROW_FACTOR = 0x1E3779B97F4A7C15  # odd, so that changes of a row and of a column do not cancel out


class ReplicaCheck:
    """Compares the replicas of one training on a schedule, and when `compare` is called.

    Args:
        hosts: Ranks with equal weights, if those of all data ranks are not; see `Strategy.hosts`.
        every: Number of steps between comparisons; 0 never compares. The first ones come earlier: 10 steps
            after the start, and then at doubling distances.

    Attributes:
        due: The step after which the next comparison is due.
        is_off: Whether replicas are never compared.
    """

    def __init__(
        self,
        job: Job,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[TrainedOptimizer],
        every: int,
        hosts: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        require_integers(0, desync_every=every)
        self._job = job
        self._models = models
        self._optimizers = optimizers
        self._every = every
        self.is_off = every == 0 or job.data.size == 1
        world = range(job.world_size)
        axes = {tuple(world if job.mesh is None else job.mesh.data_ranks(rank)) for rank in world}
        parts: set[tuple[int, ...]] = set()
        if hosts is not None:
            axes = set(hosts)
            parts = set(zip(*hosts, strict=False))  # of the outer weights
        elif job.mesh is not None:
            parts = {tuple(job.mesh.axis_ranks(rank, "dp_replicate")) for rank in world}
        # Ranks that hold the same whole tensors, and ranks that hold the same parts of sharded ones.
        self._rank_groups = [sorted(axes), sorted(parts)]
        self.reset(0)

    def reset(self, step: int) -> None:
        """The state after `step` is a new or a loaded one: earlier comparisons say nothing about it."""
        self._equal_step = step  # the last step after which all were equal
        self._was_compared = False  # whether `_equal_step` is known by a comparison
        self._distance = min(_FIRST_STEPS, self._every)
        self.due = math.inf if self.is_off else step + self._distance

    def compare_as_due(self, step: int) -> None:
        """Compare after this step, which is due, and choose the next one. All ranks call it.

        Raises:
            RankDisagreement: on all ranks.
        """
        self.compare(step)
        self._distance = min(2 * self._distance, self._every)
        self.due = step + self._distance

    def compare(self, step: int) -> None:
        """Compare now, unless this step was compared already. All ranks call it.

        Raises:
            RankDisagreement: on all ranks, naming tensor and ranks.
        """
        if self.is_off or self._equal_step == step:
            return
        kinds = self._digest_replicas()
        rows = collectives.gather(self._job, [total_of(digests) for digests in kinds])
        for kind, digests in enumerate(kinds):
            for ranks in self._rank_groups[kind]:
                if any(rows[rank][kind] != rows[ranks[0]][kind] for rank in ranks):
                    raise self._desync_error(step, digests, ranks)
        self._equal_step, self._was_compared = step, True

    def _digest_replicas(self) -> tuple[dict[str, int], dict[str, int]]:
        """A number for each whole tensor, and for this rank's part of each sharded one, by name."""
        found: dict[str, torch.Tensor] = {}
        for number, model in enumerate(self._models):
            prefix = f"models.{number}." if len(self._models) > 1 else ""
            ignored = getattr(model, "parameters_to_ignore", ())
            module = unwrap(model)
            for name, p in module.named_parameters():
                if name not in ignored:
                    found[prefix + name] = p
        for trained in self._optimizers:
            for name, p in trained.named_parameters():
                for key, value in trained.optimizer.state.get(p, {}).items():
                    found[f"{key} of {name}"] = value
        whole = {n: t for n, t in found.items() if type(t) in (torch.Tensor, torch.nn.Parameter)}
        parts = {n: local(t) for n, t in found.items() if is_sharded(t)}
        outers = [o for m in self._models if (o := unwrap(m).__dict__.get(DILOCO)) is not None]
        if outers:
            parts = {
                f"outer weights {i}.{n}": fragment.weights
                for i, outer in enumerate(outers)
                for n, fragment in enumerate(outer.fragments)
            }
        return digests_of(whole), digests_of(parts)

    def _desync_error(
        self, step: int, digests: dict[str, int], replicas: Sequence[int]
    ) -> RankDisagreement:
        gathered = collectives.gather(self._job, digests)
        all_digests = [gathered[rank] for rank in replicas]
        names = list(dict.fromkeys(name for each in all_digests for name in each))
        differing = [n for n in names if len({each.get(n) for each in all_digests}) > 1]
        name = differing[0]
        values = [each.get(name) for each in all_digests]
        common, votes = Counter(values).most_common(1)[0]
        majority = 2 * votes > len(values)
        pairs = zip(replicas, values, strict=True)
        ranks = [rank for rank, value in pairs if value != common] if majority else None
        more = f" and {len(differing) - 1} more tensors" if len(differing) > 1 else ""
        what = "ranks hold different values of"
        if ranks is not None:
            verb = "holds" if len(ranks) == 1 else "hold"
            what = f"{name_ranks(ranks)} of {len(values)} {verb} other values than the rest of"
        since = self._equal_step
        known = f"this is the first comparison after step {since}. Before it, "
        fix = "make the weights equal on all ranks before the training"
        if self._was_compared:
            fix = f"resume from a checkpoint of step {since} or before"
            known = f"all were equal after step {since}; since then "
        return RankDisagreement(
            f"{what} {name}{more}: replicas have drifted apart.",
            where=self._job.where(step=step),
            why=f"{known}something changed them on some ranks alone: a forward that did not go through the "
            "wrapped model, code under `if rank == ...`, a weight written outside the optimizer, ranks with "
            "different processors or numbers of threads, or faulty memory.",
            fix=f"{fix}; if the difference is intended, use desync_every=0.",
            parameter=name,
            differing=differing,
            ranks=ranks,
            step=step,
            since=since,
        )


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """A number for each tensor that is not empty, which depends on each of its bits."""
    return read_sums({n: sum_of(t.detach()) for n, t in tensors.items() if t.numel()})


def read_sums(sums: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The values of `sum_of`, with one transfer from each device."""
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, value in sums.items():
        by_device.setdefault(value.device, {})[name] = value
    return {
        name: value
        for each in by_device.values()
        for name, value in zip(each, torch.stack(list(each.values())).tolist(), strict=True)
    }


def total_of(digests: Mapping[str, int]) -> int:
    """One number for all of them."""
    # Different odd factors, so that equal changes of two tensors do not cancel out.
    values = [digests[name] for name in sorted(digests)]
    return int(_weighed(torch.tensor(values, dtype=torch.int64)))


def _weighed(values: torch.Tensor) -> torch.Tensor:
    """The sum of int64 values, each times an odd number of its own."""
    factors = torch.arange(len(values), dtype=torch.int64, device=values.device) * 2 + 1
    return (values * factors).sum()


def sum_of(tensor: torch.Tensor) -> torch.Tensor:
    """A number that depends on each bit of a tensor: shape (), int64, on its device."""
    data = tensor.contiguous().view(-1)
    if data.storage_offset() * data.element_size() % _WORD_BYTES:
        data = data.clone()
    data = data.view(torch.uint8)
    whole = len(data) // _WORD_BYTES * _WORD_BYTES
    # Sums of 64-bit integers are limited by memory speed; those of smaller integers take 20 times as long.
    words = data[:whole].view(torch.int64)
    cut = len(words) // _COLUMNS * _COLUMNS
    total = _weighed(words[cut:])
    if cut:
        grid = words[:cut].view(-1, _COLUMNS)
        total += _weighed(grid.sum(0)) + _ROW_FACTOR * _weighed(grid.sum(1))
    if whole < len(data):
        total += _weighed(data[whole:].to(torch.int64)) * _ROW_FACTOR
    return total
