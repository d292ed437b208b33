"""Compression of the gradients that DDP exchanges: torch's communication hooks, with a state that is saved.

- "fp16", "bf16": gradients are cast before they are summed, and back afterwards.
- "powersgd": each matrix is approximated by a product of two thin matrices (Vogels et al., 2019,
  https://arxiv.org/abs/1905.13727). What the approximation leaves out is added to the next step's gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import CheckpointError, ConfigError
from paceline.job import collectives
from paceline.job.job import Job
from paceline.shm.group import ShmGroup

MEASURE_EVERY = 100  # steps; a measurement costs one uncompressed exchange
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_HOOKS: dict[str, Any] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}


@dataclass(frozen=True, kw_only=True)
class PowerSGD:
    """Options of `compress="powersgd"`.

    Args:
        rank: Columns of the thin matrices. More columns send more and lose less.
        start_step: Steps before the first compressed one, at least 2; early gradients compress badly.

    Raises:
        ConfigError: an option is out of range.

    Collective: none.
    """

    rank: int = 2
    start_step: int = 100

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("start_step", 2)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(
                    f"PowerSGD: {name} must be an integer of at least {least}, got {value!r}."
                )


def refuse_compression(compress: Any, *, fixed_buckets: bool, sparse: bool) -> None:
    """Refuse a value of `compress` that is unknown, or that needs buckets which never change.

    Raises:
        ConfigError: it is neither None, "fp16", "bf16", "powersgd" nor a PowerSGD; it is combined with sparse
            gradients; or PowerSGD with an option that lets torch lay out its buckets later.
    """
    if compress is None:
        return
    is_cast = isinstance(compress, str) and compress in _DTYPES
    if not is_cast and compress != "powersgd" and not isinstance(compress, PowerSGD):
        raise ConfigError(
            f"unknown compression: {compress!r}.",
            fix='compress="fp16", "bf16", "powersgd" or paceline.PowerSGD(rank=4).',
        )
    if sparse:
        raise ConfigError(
            "compression cannot be combined with sparse gradients.",
            why="torch neither casts nor compresses them.",
            fix="leave compress out, or build the layers with sparse=False.",
        )
    if not is_cast and not fixed_buckets:
        raise ConfigError(
            "PowerSGD cannot be combined with static_graph or find_unused.",
            why="its state belongs to gradient buckets, which torch lays out again with these options.",
            fix='leave them out, or use compress="bf16".',
        )


class SquaredNorms(NamedTuple):
    """Of a bucket: the norm of what compression changed, and of the exact gradient, both squared."""

    error: torch.Tensor
    gradient: torch.Tensor


class Compression:
    """The communication hook of one wrapped model, and its measurements.

    Attributes:
        has_feedback: Whether what compression leaves out of a step is added to the next step.
    """

    def __init__(
        self,
        job: Job,
        wrapper: DistributedDataParallel,
        compress: str | PowerSGD,
        bucket_mb: float,
    ) -> None:
        self._job = job
        self._group: Any = job.data.group
        self._bucket_mb = bucket_mb
        self._cast = _DTYPES.get(compress) if isinstance(compress, str) else None
        self._power: Any = None
        self._hook: Any = _HOOKS.get(compress) if isinstance(compress, str) else None
        self.has_feedback = self._hook is None
        sizes = [p.element_size() for p in wrapper.module.parameters() if p.requires_grad]
        if self._cast is not None and max(sizes) <= self._cast.itemsize:
            raise ConfigError(
                f"compress={compress!r} has no effect: all gradients have 16 bits already.",
                fix="leave compress out.",
            )
        if self._hook is None:
            options = compress if isinstance(compress, PowerSGD) else PowerSGD()
            if isinstance(self._group, ShmGroup):
                # The hook starts a collective in the callback of the one before, and waits for it there. In
                # the shm group the thread that completes collectives runs it, and would wait for itself.
                self._group = job.data.control
            self._power = powerSGD_hook.PowerSGDState(
                self._group,
                matrix_approximation_rank=options.rank,
                start_powerSGD_iter=options.start_step,
                orthogonalization_epsilon=1e-8,  # a gradient may be 0
            )
            self._hook = powerSGD_hook.powerSGD_hook
        self._steps = 0
        self._saved_bytes = 0
        self._squares: list[SquaredNorms] = []  # of each bucket
        # A function without annotations and with another name: torch refuses its bf16 hook by name on CPU.
        wrapper.register_comm_hook(None, lambda state, bucket: self._reduce(bucket))

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        exact = None
        if self._steps % MEASURE_EVERY == 0:
            if bucket.index() == 0:
                self._saved_bytes, self._squares = 0, []
            exact = buffer / self._group.size()
            dist.all_reduce(exact, group=self._group)
        future = self._compressed(bucket)
        if exact is not None:
            future = future.then(lambda done: self._measure(exact, done.value()))
        if bucket.is_last():
            self._steps += 1
        return future

    def _compressed(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if self._power is None:
            assert self._cast is not None
            saved = buffer.numel() * (buffer.element_size() - self._cast.itemsize)
            self._saved_bytes += max(saved, 0)
            hook = self._hook if saved > 0 else default_hooks.allreduce_hook
            future: torch.futures.Future[torch.Tensor] = hook(self._group, bucket)
            return future
        power = self._power
        before = power.total_numel_before_compression - power.total_numel_after_compression
        future = self._hook(power, bucket)
        after = power.total_numel_before_compression - power.total_numel_after_compression
        self._saved_bytes += (after - before) * buffer.element_size()
        if not buffer.is_cuda:
            # The hook starts collectives in callbacks. On CPU those run in threads, so with several buckets
            # in flight the ranks could start them in different orders.
            future.wait()
        return future

    def _measure(self, exact: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        error, gradient = (torch.linalg.vector_norm(x).double() for x in (result - exact, exact))
        self._squares.append(SquaredNorms(error.square(), gradient.square()))
        return result

    def measurement(self) -> tuple[int, list[SquaredNorms]] | None:
        """After a measured step: the bytes that this rank did not send, and norms of each bucket, once."""
        if not self._squares:
            return None
        measured, self._squares = (self._saved_bytes, self._squares), []
        return measured

    def state_dict(self) -> dict[str, Any] | None:
        """The state of PowerSGD, equal on all ranks; None for a cast, which has none.

        The part that was left out differs between ranks, but a step depends on its mean over ranks only. The
        mean is saved, so the state fits any number of ranks.

        Collective: all ranks.
        """
        if self._power is None:
            return None
        errors = {}
        for index, error in sorted(self._power.error_dict.items()):
            errors[str(index)] = collectives.all_reduce(self._job, error / self._job.data.size)
        return {
            "bucket_mb": self._bucket_mb,
            "rank": self._power.matrix_approximation_rank,
            "steps": self._power.iter,
            "errors": errors,
            "p": {str(index): p.clone() for index, p in self._power.p_memory_dict.items()},
            "q": {str(index): q.clone() for index, q in self._power.q_memory_dict.items()},
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load the state of an earlier run; None starts anew.

        Raises:
            CheckpointError: it was saved with another `bucket_mb`, or another rank of PowerSGD.
        """
        if self._power is None:
            return
        state = state or {"bucket_mb": self._bucket_mb, "steps": 0, "errors": {}, "p": {}, "q": {}}
        if state["bucket_mb"] != self._bucket_mb:
            raise CheckpointError(
                f"the state of PowerSGD was saved with bucket_mb={state['bucket_mb']:g}.",
                why="it belongs to gradient buckets of that size.",
                fix=f"paceline.ddp(..., bucket_mb={state['bucket_mb']:g}), or resume='never'.",
            )
        rank = self._power.matrix_approximation_rank
        if (saved := state.get("rank", rank)) != rank:  # older versions did not save it
            raise CheckpointError(
                f"the state of PowerSGD was saved with rank {saved}, but its rank is {rank} now.",
                why="its matrices have as many columns as the rank.",
                fix=f"compress=paceline.PowerSGD(rank={saved}), or resume='never'.",
            )
        self._power.iter = self._steps = state["steps"]
        self._power.error_dict = _by_index(state["errors"])
        self._power.p_memory_dict = _by_index(state["p"])
        self._power.q_memory_dict = _by_index(state["q"])


def _by_index(tensors: dict[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {int(index): tensor.clone() for index, tensor in tensors.items()}
