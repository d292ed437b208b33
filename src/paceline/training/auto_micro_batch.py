"""`micro_batch="auto"`: repeat a step in smaller micro-batches while a rank runs out of memory.

A rank that runs out of memory between the collectives of a step would leave the others waiting. So the
micro-batches run without collectives; then the ranks exchange whether all have succeeded; only then a padding
micro-batch (`Plan.closes_with_padding`) sums the gradients. If a rank has failed, all ranks discard the
gradients, restore the buffers of the models, and read the step again in micro-batches of half the size.
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
from paceline.parallel.ddp import DDPStrategy
from paceline.parallel.modules import unwrap
from paceline.parallel.strategy import Strategy
from paceline.parallel.syncbn import SyncBatchNorm, plain_batchnorms


class _FailedElsewhere(Exception):
    """Another rank ran out of memory in this step."""


class AutoMicroBatch:
    """Runs the steps of one training.

    Raises:
        ConfigError: forwards of the models have collectives, or the micro-batch changes the result.
    """

    def __init__(
        self, job: Job, batches: Batches, models: Sequence[nn.Module], strategy: Strategy
    ) -> None:
        self._job, self._batches, self._models = job, batches, models
        self._full: list[int] = []  # ranks without memory in the last try
        fix = "give a number: micro_batch=8."
        if type(strategy) not in (Strategy, DDPStrategy):
            raise ConfigError(
                'micro_batch="auto" is for training on one process and with paceline.ddp.',
                why="with split models, forwards have collectives, in which the others would wait for a rank "
                "that runs out of memory; with reproducible=True, the micro-batch decides the bits.",
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
        for model in models:
            if names := plain_batchnorms(model):
                log.once(
                    f'micro_batch="auto": BatchNorm in {listed(names)} normalises by the samples of one '
                    "forward, so the result depends on the memory of the device."
                )

    def run(
        self,
        run_loop: Callable[[Callable[[], None]], None],
        begin_again: Callable[[Callable[[PlannedStep], PlannedStep]], None],
    ) -> None:
        """Run the loop of a step until it succeeds on all ranks.

        Args:
            run_loop: Runs it; calls its argument before the forward of the last micro-batch.
            begin_again: See `Step.begin_again`.

        Raises:
            StepError: on all ranks: a micro-batch of one sample does not fit.

        Collective: all ranks.
        """
        saved = self._saved_buffers()
        while not self._succeeds(run_loop):
            # The frames of the error, which hold activations, are gone; some objects are in cycles.
            gc.collect()
            if self._job.device.type != "cpu":
                torch.get_device_module(self._job.device).empty_cache()
            self._restore(saved)
            begin_again(self._cut)

    def _succeeds(self, run_loop: Callable[[Callable[[], None]], None]) -> bool:
        is_agreed = False

        def before_last() -> None:
            nonlocal is_agreed
            if self._job.data.size > 1:  # else the last one is not the padding
                is_agreed = True
                if self._agree(failed=False):
                    raise _FailedElsewhere

        try:
            run_loop(before_last)
        except _FailedElsewhere:
            return False
        except torch.OutOfMemoryError:
            if is_agreed:
                raise  # in the padding micro-batch, while the others are in its collectives
            self._agree(failed=True)
            return False
        return True

    def _agree(self, *, failed: bool) -> bool:
        """Whether a rank has run out of memory."""
        everyone = collectives.gather(self._job, failed, call="step.run")
        self._full = [rank for rank, each in enumerate(everyone) if each]
        return bool(self._full)

    def _cut(self, step: PlannedStep) -> PlannedStep:
        largest = min(self._batches.micro_batch, -(-step.num_samples // self._job.data.size))
        if largest == 1:
            raise StepError(
                f"a micro-batch of one sample does not fit into the memory of {name_ranks(self._full)}.",
                where=self._job.where(),
                fix="use smaller samples, precision='bf16', activation checkpointing, or paceline.fsdp.",
            )
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

    def _saved_buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        buffers = [buffer for model in self._models for buffer in unwrap(model).buffers()]
        return [(buffer, buffer.clone()) for buffer in buffers]

    def _restore(self, saved: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with torch.no_grad():
            for buffer, value in saved:
                buffer.copy_(value)
