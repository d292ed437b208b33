"""`micro_batch="auto"`: repeat a step in smaller micro-batches while a rank runs out of memory.

A rank that runs out of memory between the collectives of a step would leave the others waiting.

With DDP the micro-batches run without collectives; then the ranks exchange whether all have succeeded; only
then a padding micro-batch (`Plan.closes_with_padding`) sums the gradients. With FSDP each micro-batch has
collectives. A rank that fails finishes the step with padding micro-batches, which make those that are left
(`paceline.parallel.replay`); after the last backward the ranks exchange whether all have succeeded.

If a rank has failed, all ranks discard the gradients, restore the buffers of the models, and read the step
again in micro-batches of half the size.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch
from torch import nn

from paceline import log
from paceline.data.batches import Batches
from paceline.data.plan import PlannedStep
from paceline.errors import ConfigError, StepError, listed, name_ranks
from paceline.job import collectives
from paceline.job.job import Job
from paceline.parallel.buffers import Buffers
from paceline.parallel.ddp import DDPStrategy
from paceline.parallel.strategy import Strategy
from paceline.parallel.syncbn import SyncBatchNorm, plain_batchnorms

_RunLoop = Callable[[Callable[[bool], None]], None]
_BeginAgain = Callable[[Callable[[PlannedStep], PlannedStep]], None]


class _Failed(Exception):
    """A rank ran out of memory in this step."""


class AutoMicroBatch:
    """Runs the steps of one training.

    Raises:
        ConfigError: forwards of the models have collectives, or the micro-batch changes the result.
    """

    def __init__(
        self, job: Job, batches: Batches, models: Sequence[nn.Module], strategy: Strategy
    ) -> None:
        self._job, self._batches = job, batches
        self._buffers = Buffers(models)
        self._full: list[int] = []  # ranks without memory in the last try
        self._replay = strategy.make_replay()
        self._state = "running"  # of a step with replay; then "failed", on this rank, and "agreed"
        fix = "give a number: micro_batch=8."
        if self._replay is None and type(strategy) not in (Strategy, DDPStrategy):
            raise ConfigError(
                'micro_batch="auto" is for training on one process, with paceline.ddp, and from torch 2.13 '
                "on with paceline.fsdp.",
                why="other split models have collectives in their forwards, in which the others would wait "
                "for a rank that runs out of memory; with reproducible=True, the micro-batch decides the "
                "bits.",
                fix=fix,
                option="micro_batch",
            )
        if any(isinstance(layer, SyncBatchNorm) for model in models for layer in model.modules()):
            raise ConfigError(
                'micro_batch="auto" cannot be used with paceline.sync_batchnorm.',
                why="its forwards are collectives, and it normalises by the samples of one forward.",
                fix=fix,
                option="micro_batch",
            )
        if self._replay is None:
            batches.close_with_padding()
        for model in models:
            if names := plain_batchnorms(model):
                log.once(
                    f'micro_batch="auto": BatchNorm in {listed(names)} normalises by the samples of one '
                    "forward, so the result depends on the memory of the device."
                )

    def run(self, run_loop: _RunLoop, begin_again: _BeginAgain) -> None:
        """Run the loop of a step until it succeeds on all ranks.

        Args:
            run_loop: Runs it; calls its argument before each forward, with whether it is the last.
            begin_again: See `Step.begin_again`.

        Raises:
            StepError: a micro-batch of one sample does not fit; on all ranks, with FSDP on that rank.

        Collective: all ranks.
        """
        self._buffers.keep()
        succeeds = self._succeeds if self._replay is None else self._succeeds_with_replay
        while not succeeds(run_loop, begin_again):
            self._free_memory()
            self._buffers.restore()
            begin_again(self._cut)

    def _free_memory(self) -> None:
        # The frames of the error, which hold activations, are gone; some objects are in cycles.
        gc.collect()
        if self._job.device.type != "cpu":
            torch.get_device_module(self._job.device).empty_cache()

    def _succeeds(self, run_loop: _RunLoop, _: _BeginAgain) -> bool:
        is_agreed = False

        def before_forward(is_last: bool) -> None:
            nonlocal is_agreed
            if is_last and self._job.data.size > 1:  # else the last one is not the padding
                is_agreed = True
                if self._agree(failed=False):
                    raise _Failed

        try:
            run_loop(before_forward)
        except _Failed:
            return False
        except torch.OutOfMemoryError:
            if is_agreed:
                raise  # in the padding micro-batch, while the others are in its collectives
            self._agree(failed=True)
            return False
        return True

    def _succeeds_with_replay(self, run_loop: _RunLoop, begin_again: _BeginAgain) -> bool:
        replay, begun = self._replay, 0
        assert replay is not None

        def before_forward(_: bool) -> None:
            nonlocal begun
            begun += 1
            replay.begin_micro_batch()

        self._state = "running"
        try:
            try:
                run_loop(before_forward)
                return True
            except torch.OutOfMemoryError:
                if self._state == "agreed":
                    raise
            self._state = "failed"
            self._free_memory()
            finished = max(0, begun - 1)
            if begun:
                replay.repeat()
            begin_again(lambda step: self._batches.padding(step, step.num_micro_batches - finished))
            try:
                run_loop(before_forward)
            except torch.OutOfMemoryError as error:
                raise self._too_large([self._job.rank]) from error
        except _Failed:
            replay.reset()
        return False

    def after_backward(self) -> None:
        """Called after the last backward, before the gradients are completed."""
        if self._replay is not None:
            has_failed = self._state == "failed"
            self._state = "agreed"
            if self._agree(failed=has_failed):
                raise _Failed

    def _agree(self, *, failed: bool) -> bool:
        """Whether a rank has run out of memory."""
        everyone = collectives.gather(self._job, failed, call="step.run")
        self._full = [rank for rank, each in enumerate(everyone) if each]
        return bool(self._full)

    def _cut(self, step: PlannedStep) -> PlannedStep:
        largest = min(self._batches.micro_batch, -(-step.num_samples // self._job.data.size))
        if largest == 1:
            raise self._too_large(self._full)
        half = -(-largest // 2)
        if self._job.rank == 0:
            log.logger.info(
                "%s ran out of memory in a micro-batch of %d samples: the step is repeated with %d on all "
                "ranks, as are those after it.",
                name_ranks(self._full),
                largest,
                half,
            )
        return self._batches.cut_again(step, half)

    def _too_large(self, ranks: list[int]) -> StepError:
        return StepError(
            f"a micro-batch of one sample does not fit into the memory of {name_ranks(ranks)}.",
            where=self._job.where(),
            fix="use smaller samples, precision='bf16', activation checkpointing, or paceline.fsdp on more "
            "ranks.",
        )
