"""`recheck_every`: compute a step again, to find hardware that computes wrong numbers.

The forwards and backwards of a step run again from the same weights: on the same rank, and on rank `r` with
the samples of rank `r + 1`. The loop over the micro-batches gets them after those of the step, and their
gradients stay on the rank. The step itself keeps its gradients, buffers and generators, so its result is that
of a training without this option.

A hook on each parameter takes a number of its gradient that depends on each bit (`desync.sum_of`) after each
backward, before DDP sums it over the ranks. Equal numbers mean equal bits. Not covered: the sum over ranks.
The update is: the replicas are compared after it. `recheck_verdict.py` judges what was computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline import log
from paceline.data.batches import Batches
from paceline.data.digest import digest
from paceline.data.plan import MicroBatch, PlannedStep
from paceline.errors import ConfigError, PacelineError, StepError
from paceline.job import collectives, rng
from paceline.job.arguments import require_integers
from paceline.job.job import Job
from paceline.parallel.buffers import Buffers
from paceline.parallel.ddp import DDPStrategy
from paceline.parallel.exact import ExactStrategy
from paceline.parallel.loss_graph import uses_all_gather
from paceline.parallel.strategy import Strategy
from paceline.parallel.syncbn import SyncBatchNorm
from paceline.training import recheck_verdict
from paceline.training.desync import ReplicaCheck, read_sums, sum_of, total_of
from paceline.training.optimizers import TrainedOptimizer
from paceline.training.recheck_verdict import LOSS, Numbers

# Computes the share of the rank that is so many ranks further; yields the batches.
_Compute = Callable[[int], Generator[Any, None, "_Computed"]]
_FACTOR = 0x1E3779B97F4A7C15  # odd, so that the order of backwards counts


@dataclass
class _Computed:
    """One computation of a rank's share of a step.

    Attributes:
        sums: By parameter, for its gradient: `sum_of`, on the device.
        inputs: Numbers of the batches.
        losses: Of the micro-batches.
        finite: With a computation again: whether each gradient is finite.
        numbers: `sums` on the host, with that of the losses, when it has ended.
    """

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    finite: list[torch.Tensor] = field(default_factory=list)
    numbers: Numbers = field(default_factory=dict)


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
        self._current = _Computed()
        self._before = Buffers(models)

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
        self._before.keep()
        generators = rng.states(self._job.device)
        if is_due:
            self._watch()
        for batch in once():
            if is_due:  # before the loop's body, which may change the batch
                self._current.inputs.append(digest(batch))
            yield batch
        first = self._take()
        is_finite = not self._reads_gradients or self._has_finite_gradients()
        if not is_due and is_finite:
            return
        self._reads_gradients &= is_finite
        kept = [(p, p.grad) for model in self._models for p in model.parameters()]
        after = Buffers(self._models), rng.states(self._job.device)
        compute = partial(self._compute, planned, generators, again)
        if not is_due:
            first = yield from self._recompute_non_finite(number, first.losses, compute)
        yield from self._examine(number, first, compute)
        if not is_finite and self._job.rank == 0:
            log.logger.warning(
                "step %d was computed again%s, with equal bits: the NaN or infinity comes from the model, "
                "the samples or the learning rate, not from hardware.",
                number,
                ", on other ranks too" if self._rotates else "",
            )
        self._set_state(*after)
        for p, gradient in kept:
            p.grad = gradient

    def record_loss(self, loss: torch.Tensor, own: torch.Tensor | None) -> None:
        """Take the loss of a micro-batch. `own` is its sum over the samples, None if it is padding."""
        if own is not None:
            self._current.losses.append(own)
        if self._hooks and self._rotates and uses_all_gather(loss):
            self._rotates = self._stay("the loss is over the samples of all ranks, in their order")

    def forget(self) -> None:
        """Forget what was recorded: the strategy repeats the step."""
        self._current = _Computed()

    def leave_step(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # Computing.

    def _recompute_non_finite(
        self, number: int, losses: list[torch.Tensor], compute: _Compute
    ) -> Generator[Any, None, _Computed]:
        """Compute a step again whose gradient holds NaN or infinity."""
        first = yield from compute(0)
        is_finite = all(map(bool, [*first.finite, *(each.isfinite() for each in first.losses)]))
        differs = any(not torch.equal(*pair) for pair in zip(losses, first.losses, strict=True))
        try:
            everyone = collectives.gather(self._job, [is_finite, differs], call="recheck_every")
        except StepError as error:  # the others went on, so their gradient is finite
            only_here = recheck_verdict.only_on(number, self._job.rank)
            only_here.where = self._where(number)
            raise only_here from error
        if all(finite for finite, _ in everyone):
            ranks = [rank for rank, (_, other) in enumerate(everyone) if other]
            raise self._located(recheck_verdict.became_finite(number, ranks))
        return first

    def _examine(self, number: int, first: _Computed, compute: _Compute) -> Iterator[Any]:
        job = self._job
        computed = [first, (yield from compute(0))]
        if self._rotates:
            computed.append((yield from compute(1)))
        # For each computation, a number for all gradients, and one for all samples.
        rows = collectives.gather(job, [[total_of(c.numbers), c.inputs] for c in computed])
        if error := recheck_verdict.other_samples(number, [[each[1] for each in r] for r in rows]):
            raise self._located(error)
        unstable = [rank for rank, row in enumerate(rows) if row[0] != row[1]]
        # By rank of the samples. The last column is the computation of the rank before.
        wrong = [rank for rank, row in enumerate(rows) if rows[rank - 1][2:] not in ([], [row[0]])]
        if not unstable and not wrong:
            return
        if not unstable:
            self._replicas.compare(number - 1)
        last = yield from compute(0 if unstable else min(2, job.world_size - 1))
        everyone = collectives.gather(job, [each.numbers for each in (*computed, last)])
        if unstable:
            raise self._located(recheck_verdict.unstable(number, unstable, everyone))
        raise self._located(recheck_verdict.wrong(number, wrong, everyone))

    def _compute(
        self,
        planned: PlannedStep,
        generators: dict[str, Any],
        again: Callable[[list[MicroBatch]], Iterator[Any]],
        shift: int,
    ) -> Generator[Any, None, _Computed]:
        """Compute the share of the rank that is `shift` ranks further, from the state before the step."""
        axis = self._job.data
        rank = (axis.rank + shift) % axis.size
        micros = self._batches.read_again(planned, rank, equal=self._equal)
        self._current = _Computed(inputs=[digest(micro.batch) for micro in micros])
        self._set_state(self._before, generators)
        for model in self._models:
            for p in model.parameters():
                p.grad = None
        self._watch(is_again=True)
        yield from again(micros)
        return self._take()

    def _watch(self, *, is_again: bool = False) -> None:
        for trained in self._optimizers:
            for name, p in trained.named_parameters():
                if p.requires_grad:
                    take = partial(self._take_gradient, name, is_again)
                    hook = p.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
                    self._hooks.append(hook)

    def _take_gradient(self, name: str, is_again: bool, p: torch.Tensor) -> None:
        assert p.grad is not None
        gradient = p.grad.detach()
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if not gradient.numel():
            return
        sums = self._current.sums
        number, earlier = sum_of(gradient), sums.get(name)
        sums[name] = number if earlier is None else earlier * _FACTOR + number
        if is_again:
            self._current.finite.append(gradient.isfinite().all())
            if self._is_exact:
                p.grad = None

    def _take(self) -> _Computed:
        """What was recorded in this computation, which has ended."""
        computed, is_watched = self._current, bool(self._hooks)
        self.leave_step()
        if is_watched and computed.losses:
            computed.sums[LOSS] = sum_of(torch.stack(computed.losses))
        computed.numbers = read_sums(computed.sums)
        return computed

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

    def _set_state(self, buffers: Buffers, generators: dict[str, Any]) -> None:
        buffers.restore()
        rng.set_states(self._job.device, generators)

    def _located(self, error: PacelineError) -> PacelineError:
        """An error that all ranks raise, with where the ranks are that it names."""
        everyone = collectives.gather(self._job, self._where(error.step))
        error.where = "; ".join(
            everyone[rank] for rank in (error.ranks or range(len(everyone)))[:5]
        )
        return error

    def _where(self, number: int) -> str:
        return self._job.where(step=number, detail=f"device {self._job.device}")
