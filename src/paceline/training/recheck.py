"""`recheck_every`: compute a step again, to find hardware that computes wrong numbers.

The forwards and backwards of a step run again from the same weights: on the same rank, and on rank `r` with
the samples of rank `r + 1`. The loop over the micro-batches gets them after those of the step, and their
gradients stay on the rank. The step itself keeps its gradients, buffers and generators, so its result is that
of a training without this option.

A hook on each parameter takes a number of its gradient that depends on each bit (`desync.sum_of`) after each
backward, before DDP sums it over the ranks. Equal numbers mean equal bits. Not covered: the sum over ranks.
The update is: the replicas are compared after it.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline import log
from paceline.data.batches import Batches
from paceline.data.digest import digest
from paceline.data.plan import MicroBatch, PlannedStep
from paceline.errors import ConfigError, RankDisagreement, StepError, listed, name_ranks
from paceline.job import collectives, rng
from paceline.job.arguments import require_integers
from paceline.job.job import Job
from paceline.parallel.ddp import DDPStrategy
from paceline.parallel.exact import ExactStrategy
from paceline.parallel.loss_graph import uses_all_gather
from paceline.parallel.modules import unwrap
from paceline.parallel.strategy import Strategy
from paceline.parallel.syncbn import SyncBatchNorm
from paceline.training.desync import ReplicaCheck, read_sums, sum_of, total_of
from paceline.training.optimizers import TrainedOptimizer

_LOSS = "the loss"
_TEST_HOST = "take this host out of the job, and test it; the job resumes from its last checkpoint."
_FACTOR = 0x1E3779B97F4A7C15  # odd, so that the order of backwards counts


@dataclass(frozen=True)
class _State:
    """What a forward may change besides gradients."""

    buffers: list[tuple[torch.Tensor, torch.Tensor]]
    generators: dict[str, Any]


@dataclass(frozen=True)
class _Examined:
    """A step, its state before it, and what runs micro-batches of it again."""

    number: int
    planned: PlannedStep
    before: _State
    again: Callable[[list[MicroBatch]], Iterator[Any]]


@dataclass(frozen=True)
class _Computed:
    """One computation of a rank's share of a step.

    Attributes:
        numbers: By parameter, for its gradient; and for the loss.
        inputs: A number of the samples.
        losses: Of the micro-batches.
    """

    numbers: dict[str, int]
    inputs: int
    losses: list[torch.Tensor]


class Recheck:
    """Computes steps of one training again.

    Args:
        replicas: Compared when ranks compute different gradients: their weights may differ.
        every: Number of steps between two that are computed again.
        reads_gradients: Whether a gradient with NaN or infinity is looked for in each step. The first one is
            computed again.

    Raises:
        ConfigError: the training cannot compute steps again.

    Collective: all ranks.
    """

    def __init__(
        self,
        job: Job,
        models: Sequence[nn.Module],
        optimizers: Sequence[TrainedOptimizer],
        batches: Batches,
        strategy: Strategy,
        replicas: ReplicaCheck,
        every: int,
        reads_gradients: bool,
    ) -> None:
        self._job, self._models, self._optimizers = job, models, optimizers
        self._batches, self._replicas = batches, replicas
        self._every = every
        self._reads_gradients = reads_gradients
        self._refuse(strategy)
        self._equal = strategy.needs_equal_micro_batches
        self._is_exact = isinstance(strategy, ExactStrategy)  # it takes gradients out of `p.grad`
        self._rotates = job.data.size > 1 and self._is_alike()
        self._hooks: list[RemovableHandle] = []
        self._sums: dict[str, torch.Tensor] = {}
        self._inputs: list[int] = []
        self._losses: list[torch.Tensor] = []
        self._finite: list[torch.Tensor] = []

    def _refuse(self, strategy: Strategy) -> None:
        require_integers(1, recheck_every=self._every)
        what, why, fix = "", "", "leave recheck_every out."
        if strategy.hosts is not None:
            what, why = "diloco", "no rank of another host has the same weights."
        elif type(strategy) not in (Strategy, DDPStrategy, ExactStrategy):
            what = "models that are split over ranks"
            why = "no rank can compute the gradients of another one alone."
        elif self._batches.num_samples is None:
            what, why = "a stream", "a step is read again, and a stream is read once."
            fix = "use a map-style dataset, or leave recheck_every out."
        elif self._batches.is_auto:
            what, why = 'micro_batch="auto"', "the size of the micro-batches decides the bits."
            fix = "give a number: micro_batch=8."
        elif self._replicas.is_off and self._job.data.size > 1:
            what = "desync_every=0"
            why = "ranks with different weights compute different gradients."
            fix = "leave desync_every out."
        elif self._job.device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
            what = f"the nondeterministic kernels of {self._job.device.type}"
            why = "they give other bits each time, as faulty hardware does."
            fix = "torch.use_deterministic_algorithms(True), with CUBLAS_WORKSPACE_CONFIG=:4096:8."
        if what:
            raise ConfigError(f"recheck_every cannot be used with {what}.", why=why, fix=fix)

    def _is_alike(self) -> bool:
        """Whether all ranks compute the same bits from the same samples."""
        device = self._job.device
        processor = torch.backends.cpu.get_cpu_capability()
        if device.type != "cpu":
            processor = torch.get_device_module(device).get_device_name(device)
        own = [processor, torch.get_num_threads(), torch.__version__]
        everyone = collectives.gather(self._job, own)
        layers = (layer for model in self._models for layer in model.modules())
        if any(isinstance(layer, SyncBatchNorm) for layer in layers):
            return self._stay("SyncBatchNorm computes with the samples of all ranks")
        if any(each != own for each in everyone):
            return self._stay("ranks have different processors, numbers of threads or versions")
        return True

    def _stay(self, reason: str) -> bool:
        log.once(f"recheck_every: each rank computes only its own samples again, because {reason}.")
        return False

    def is_due(self, step: int) -> bool:
        return step % self._every == 0

    # Called by `Step`.

    def run(
        self,
        number: int,
        planned: PlannedStep,
        once: Callable[[], Iterator[Any]],
        again: Callable[[list[MicroBatch]], Iterator[Any]],
    ) -> Iterator[Any]:
        """The batches of a step, and those of its further computations.

        Args:
            once: Runs the micro-batches of the step.
            again: Runs micro-batches whose gradients stay on this rank.
        """
        self.forget()
        is_due = self.is_due(number)
        if not is_due and not self._reads_gradients:
            yield from once()
            return
        before = self._save_state()
        if is_due:
            self._watch()
        for batch in once():
            if is_due:  # before the loop's body, which may change the batch
                self._inputs.append(digest(batch))
            yield batch
        first = self._take()
        is_finite = not self._reads_gradients or self._has_finite_gradients()
        if not is_due and is_finite:
            return
        self._reads_gradients &= is_finite
        kept = [(p, p.grad) for model in self._models for p in model.parameters()]
        after = self._save_state()
        step = _Examined(number, planned, before, again)
        yield from self._examine(step, first, is_due=is_due, is_finite=is_finite)
        self._load_state(after)
        for p, gradient in kept:
            p.grad = gradient

    def record_loss(self, loss: torch.Tensor, own: torch.Tensor | None) -> None:
        """Take the loss of a micro-batch. `own` is its sum over the samples, None if it is padding."""
        if own is not None:
            self._losses.append(own)
        if self._hooks and self._rotates and uses_all_gather(loss):
            self._rotates = self._stay("the loss is over the samples of all ranks, in their order")

    def forget(self) -> None:
        """Forget what was recorded: the strategy repeats the step."""
        self._sums, self._inputs, self._losses, self._finite = {}, [], [], []

    def leave_step(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # Computing.

    def _examine(
        self, step: _Examined, first: _Computed, *, is_due: bool, is_finite: bool
    ) -> Iterator[Any]:
        job = self._job
        if not is_due:
            losses = first.losses
            first = yield from self._compute(step, 0)
            finite = all(map(bool, [*self._finite, *(each.isfinite() for each in first.losses)]))
            try:
                everyone = collectives.gather(job, finite, call="recheck_every")
            except StepError as error:  # the others went on, so their gradient is finite
                raise self._only_here(step.number) from error
            if all(everyone):
                self._raise_finite(step.number, losses, first.losses)
        second = yield from self._compute(step, 0)
        other = (yield from self._compute(step, 1)) if self._rotates else None
        found = [each for each in (first, second, other) if each]
        rows = collectives.gather(job, [[total_of(c.numbers), c.inputs] for c in found])
        unstable = [rank for rank, row in enumerate(rows) if row[0] != row[1]]
        # By rank of the samples. The last column is the computation of the rank before.
        wrong = [rank for rank, row in enumerate(rows) if other and rows[rank - 1][2] != row[0]]
        self._refuse_other_samples(step.number, [[each[1] for each in row] for row in rows])
        if unstable:
            third = yield from self._compute(step, 0)
            self._raise_unstable(step.number, unstable, first, second, third)
        if other and wrong:
            self._replicas.compare(step.number - 1)
            judge = yield from self._compute(step, 1 if job.world_size == 2 else 2)
            self._raise_wrong(step.number, wrong, first, other, judge)
        if not is_finite and job.rank == 0:
            log.logger.warning(
                "step %d was computed again%s, with equal bits: the NaN or infinity comes from the model, "
                "the samples or the learning rate, not from hardware.",
                step.number,
                ", on other ranks too" if other else "",
            )

    def _compute(self, step: _Examined, shift: int) -> Generator[Any, None, _Computed]:
        """Compute the share of the rank that is `shift` ranks further."""
        axis = self._job.data
        rank = (axis.rank + shift) % axis.size
        micros = self._batches.read_again(step.planned, rank, equal=self._equal)
        self.forget()
        self._inputs = [digest(micro.batch) for micro in micros]
        self._load_state(step.before)
        for model in self._models:
            for p in model.parameters():
                p.grad = None
        self._watch(is_again=True)
        yield from step.again(micros)
        return self._take()

    def _watch(self, *, is_again: bool = False) -> None:
        for trained in self._optimizers:
            for name, p in trained.named_parameters():
                if p.requires_grad:
                    take = functools.partial(self._take_gradient, name, is_again)
                    hook = p.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
                    self._hooks.append(hook)

    def _take_gradient(self, name: str, is_again: bool, p: torch.Tensor) -> None:
        assert p.grad is not None
        gradient = p.grad.detach()
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if not gradient.numel():
            return
        number, earlier = sum_of(gradient), self._sums.get(name)
        self._sums[name] = number if earlier is None else earlier * _FACTOR + number
        if is_again:
            self._finite.append(gradient.isfinite().all())
            if self._is_exact:
                p.grad = None

    def _take(self) -> _Computed:
        """What was recorded since the last `forget`."""
        is_watched = bool(self._hooks)
        self.leave_step()
        if is_watched and self._losses:
            self._sums[_LOSS] = sum_of(torch.stack(self._losses))
        inputs = hashlib.blake2b(repr(self._inputs).encode(), digest_size=7).digest()
        numbers = read_sums(self._sums)
        return _Computed(numbers, int.from_bytes(inputs), self._losses)

    def _has_finite_gradients(self) -> bool:
        gradients = [
            p.grad
            for trained in self._optimizers
            for p in trained.parameters
            if p.grad is not None and p.grad.layout is torch.strided
        ]
        if not gradients:  # all are sparse
            return True
        # A finite sum proves that all values are finite, and takes less time than a norm. It may overflow.
        total = torch.stack([gradient.sum().float() for gradient in gradients]).sum().item()
        return math.isfinite(total) or all(bool(each.isfinite().all()) for each in gradients)

    def _save_state(self) -> _State:
        buffers = [buffer for model in self._models for buffer in unwrap(model).buffers()]
        generators = rng.states(self._job.device)
        return _State([(buffer, buffer.clone()) for buffer in buffers], generators)

    def _load_state(self, state: _State) -> None:
        with torch.no_grad():
            for buffer, value in state.buffers:
                buffer.copy_(value)
        rng.set_states(self._job.device, state.generators)

    # Verdicts. All ranks raise them.

    def _refuse_other_samples(self, number: int, inputs: list[list[int]]) -> None:
        size = len(inputs)
        own = [rank for rank in range(size) if inputs[rank][0] != inputs[rank][1]]
        next_ = [r for r in range(size) if inputs[r][2:] not in ([], inputs[(r + 1) % size][:1])]
        if own or next_:
            ranks = sorted({*own, *next_})
            raise StepError(
                f"{name_ranks(ranks)} read other samples when step {number} was computed again.",
                where=self._where(number, ranks),
                why="the dataset, its transforms or `collate` give other values each time, on some ranks, or "
                "faulty memory has changed them.",
                fix="draw random numbers from torch, numpy or `random` with sample_randomness=True, which is "
                "the default; or leave recheck_every out.",
                step=number,
            )

    def _raise_unstable(
        self, number: int, ranks: list[int], first: _Computed, second: _Computed, third: _Computed
    ) -> None:
        job = self._job
        differing = _differing(first.numbers, second.numbers)
        # A bit that hardware flipped once is not in the third computation.
        repeats = third.numbers in (first.numbers, second.numbers)
        names, repeat = zip(*collectives.gather(job, [differing, repeats]), strict=True)
        is_minority = job.world_size == 1 or 2 * len(ranks) <= job.world_size
        what = f"step {number}, computed again, gives other gradients on {name_ranks(ranks)}"
        if not is_minority or not all(repeat[rank] for rank in ranks):
            raise StepError(
                f"{what}: {listed(names[ranks[0]])}.",
                where=self._where(number, ranks),
                why="the computation is not deterministic: kernels, random numbers that are not torch's, or "
                "values that the loop keeps from one micro-batch to the next. Or its processor or memory is "
                "unstable.",
                fix="torch.use_deterministic_algorithms(True); or leave recheck_every out.",
                step=number,
                parameters=names[ranks[0]],
            )
        raise self._fault(
            number,
            ranks,
            names[ranks[0]],
            what=what,
            why="its processor or memory is unstable.",
        )

    def _raise_wrong(
        self, number: int, wrong: list[int], first: _Computed, other: _Computed, judge: _Computed
    ) -> None:
        size = self._job.world_size
        each = collectives.gather(self._job, [c.numbers for c in (first, other, judge)])
        suspects: set[int] = set()
        names: list[str] = []
        for rank in wrong:
            before = (rank - 1) % size
            own, by_before = each[rank][0], each[before][1]
            by_judge = each[before if size == 2 else (rank - 2) % size][2]
            names = names or _differing(own, by_before)
            if by_judge == own:
                suspects.add(before)
            elif by_judge == by_before and size > 2:
                suspects.add(rank)
            else:
                suspects |= set(range(size))
        if len(suspects) <= max(1, (size - 1) // 2):
            ranks = sorted(suspects)
            raise self._fault(
                number,
                ranks,
                names,
                what=f"step {number} gives other gradients on {name_ranks(ranks)} than on other ranks, "
                "from the same weights and samples",
                why="its processor or memory is faulty.",
            )
        why = "two ranks cannot tell which of them is wrong: the processor or memory of one is faulty, or "
        raise self._fault(
            number,
            None,
            names,
            what=f"step {number} gives different gradients on different ranks, from the same weights and "
            "samples",
            why=(why if size == 2 else "")
            + "the forward depends on the rank, or on values that differ "
            "between ranks, such as buffers.",
        )

    def _raise_finite(
        self, number: int, losses: list[torch.Tensor], again: list[torch.Tensor]
    ) -> None:
        differs = any(not torch.equal(*pair) for pair in zip(losses, again, strict=True))
        everyone = collectives.gather(self._job, differs)
        ranks = [rank for rank, each in enumerate(everyone) if each]
        raise self._fault(
            number,
            ranks or None,
            [_LOSS] if ranks else [],
            what=f"the gradient of step {number} held NaN or infinity; computed again, it does not",
            why=f"the processor or memory of {name_ranks(ranks) if ranks else 'a rank'} is faulty.",
        )

    def _only_here(self, number: int) -> RankDisagreement:
        rank = self._job.rank
        return RankDisagreement(
            f"the gradient of step {number} holds NaN or infinity on rank {rank}, and not on all ranks, "
            "after its sum over ranks.",
            where=self._job.where(step=number, detail=f"device {self._job.device}"),
            why="the sum is equal on all ranks, unless the program has changed it on one: the memory of "
            f"rank {rank} may be faulty.",
            fix=_TEST_HOST,
            ranks=[rank],
            step=number,
        )

    def _fault(
        self, number: int, ranks: list[int] | None, names: list[str], *, what: str, why: str
    ) -> RankDisagreement:
        return RankDisagreement(
            f"{what}{': ' if names else ''}{listed(names)}.",
            where=self._where(number, ranks),
            why=why,
            fix=_TEST_HOST
            if ranks
            else "compare the ranks' processors, libraries and buffers, and test the hosts.",
            parameter=names[0] if names else None,
            differing=names,
            ranks=ranks,
            step=number,
        )

    def _where(self, number: int, ranks: Sequence[int] | None) -> str:
        own = self._job.where(step=number, detail=f"device {self._job.device}")
        everyone = collectives.gather(self._job, own)
        return "; ".join(everyone[rank] for rank in (ranks or range(len(everyone)))[:5])


def _differing(one: dict[str, int], other: dict[str, int]) -> list[str]:
    return [name for name, value in one.items() if value != other.get(name)]
