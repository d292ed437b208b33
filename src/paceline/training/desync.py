"""Whether all ranks still hold the same weights and optimizer state, bit for bit, and which ranks differ.

Buffers and generators are compared if requested: those of BatchNorm and of dropout differ by design.

Each tensor of a rank becomes one number, the wrapping sum of its bytes as 64-bit integers, which does not
depend on the order of addition. Ranks compare one number for all tensors, and only if it differs one for each
tensor. Sharded tensors and parameters that DDP ignores are not replicas.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Sequence

import torch

from paceline.errors import ConfigError, Desync, name_ranks, rank_location
from paceline.job import collectives, rng
from paceline.job.job import Job
from paceline.parallel.modules import unwrap
from paceline.training.optimizers import TrainedOptimizer

_SHARE = 0.005  # largest share of the time that comparisons may take
_FIRST_STEPS = 10  # the first comparison comes early, to measure its cost
_EXCHANGE_S = 1e-3  # assumed until it is measured
_WORD_BYTES = 8


class Replicas:
    """Compares the replicas of one training at intervals, and when `look` is called.

    Args:
        every: Steps from one comparison to the next; None chooses by their cost; 0 never compares.
        also: What is compared besides weights and optimizer state: "buffers", "rng".
    """

    def __init__(
        self,
        job: Job,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[TrainedOptimizer],
        every: int | None,
        also: Collection[str],
    ) -> None:
        if isinstance(also, str) or not {"buffers", "rng"}.issuperset(also):
            raise ConfigError(f'desync_also may hold "buffers" and "rng", got {also!r}.')
        if also and every == 0:
            raise ConfigError("desync_also has no effect with desync_every=0.")
        if every is not None and (isinstance(every, bool) or every < 0):
            raise ConfigError(f"desync_every must be a number of steps or None, got {every!r}.")
        self._job = job
        self._models = models
        self._optimizers = optimizers
        self._every = every
        self._also = also
        self._off = every == 0 or job.world_size == 1
        self._equal: int | None = None  # the last step after which all were equal
        self._due = 0
        self._looked_s = self._cost_s = 0.0

    def step_ended(self, step: int) -> None:
        """Compare if it is due after this step. All ranks call it.

        Raises:
            Desync: on all ranks.
        """
        if self._off:
            return
        if self._equal is None or step <= self._equal:  # or another state was loaded
            self._equal, self._looked_s = step - 1, time.perf_counter()
            self._due = step - 1 + (self._every or _FIRST_STEPS)
        if step >= self._due:
            self.look(step)

    def look(self, step: int) -> None:
        """Compare now, unless all were equal in this step already. All ranks call it.

        Raises:
            Desync: on all ranks, naming tensor and ranks.
        """
        if self._off or self._equal == step or self._equal is None:
            return
        began = time.perf_counter()
        digests = self._digests()
        odd = torch.arange(len(digests), dtype=torch.int64) * 2 + 1
        values = [digests[name] for name in sorted(digests)]
        whole = int((torch.tensor(values, dtype=torch.int64) * odd).sum())
        cost_s = self._cost_s or time.perf_counter() - began + _EXCHANGE_S
        step_s = (began - self._looked_s) / (step - self._equal)
        told = torch.tensor([whole, int(cost_s * 1e9), int(step_s * 1e9)])
        rows = [row.tolist() for row in collectives.gather_tensor(self._job, told)]
        if any(row[0] != whole for row in rows):
            raise self._found(step, digests)
        every = self._every
        if every is None:
            # From the measurements of all ranks, so that all compute the same number.
            cost, usual = max(row[1] for row in rows), min(row[2] for row in rows)
            every = max(_FIRST_STEPS, math.ceil(cost / (_SHARE * max(usual, 1))))
        self._equal, self._due = step, step + every
        self._looked_s = time.perf_counter()
        self._cost_s = self._looked_s - began

    def _digests(self) -> dict[str, int]:
        """A number for each compared tensor or generator, by its name."""
        found: dict[str, torch.Tensor] = {}
        for number, model in enumerate(self._models):
            prefix = f"models.{number}." if len(self._models) > 1 else ""
            alone = getattr(model, "parameters_to_ignore", ())
            module = unwrap(model)
            for name, p in module.named_parameters():
                if name not in alone:
                    found[prefix + name] = p
            for name, buffer in module.named_buffers() if "buffers" in self._also else ():
                if name not in alone:
                    found[f"buffer {prefix}{name}"] = buffer
        for trained in self._optimizers:
            for name, p in trained.named_parameters():
                for key, value in trained.optimizer.state.get(p, {}).items():
                    found[f"{key} of {name}"] = value
        by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
        for name, tensor in found.items():
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.numel():
                by_device.setdefault(tensor.device, {})[name] = _sum(tensor.detach())
        # One transfer for each device.
        digests = {
            name: value
            for sums in by_device.values()
            for name, value in zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)
        }
        if "rng" in self._also:
            states = rng.digests(self._job.device).items()
            digests |= {f"the state of {name}": value for name, value in states}
        return digests

    def _found(self, step: int, digests: dict[str, int]) -> Desync:
        everybody = collectives.gather(self._job, digests)
        names = list(dict.fromkeys(name for each in everybody for name in each))
        differing = [n for n in names if len({each.get(n) for each in everybody}) > 1]
        name = differing[0]
        values = [each.get(name) for each in everybody]
        common, votes = Counter(values).most_common(1)[0]
        majority = 2 * votes > len(values)
        ranks = [r for r, v in enumerate(values) if v != common] if majority else None
        more = f" and {len(differing) - 1} more tensors" if len(differing) > 1 else ""
        who, other = "ranks hold", "different values of"
        if ranks is not None:
            who = f"{name_ranks(ranks)} of {len(values)}"
            who, other = f"{who} hold{'s' * (len(ranks) == 1)}", "other values than the rest of"
        since = self._equal
        return Desync(
            f"{who} {other} {name}{more}: replicas have drifted apart.",
            where=rank_location(self._job.rank, self._job.world_size, step=step),
            why=f"all were equal after step {since}; since then something changed them on some ranks "
            "alone: code under `if rank == ...`, a weight written outside the optimizer, ranks with "
            "different processors or numbers of threads, or faulty memory.",
            fix="resume from a checkpoint of that step or before; if the difference is intended, "
            "desync_every=0.",
            parameter=name,
            differing=differing,
            ranks=ranks,
            step=step,
            since=since,
        )


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.contiguous().view(-1)
    if data.storage_offset() * data.element_size() % _WORD_BYTES:
        data = data.clone()
    data = data.view(torch.uint8)
    whole = len(data) // _WORD_BYTES * _WORD_BYTES
    # Sums of 64-bit integers run at the speed of memory; of smaller ones at a twentieth of it.
    return data[:whole].view(torch.int64).sum() + data[whole:].sum(dtype=torch.int64)
