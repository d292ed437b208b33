"""How a rank that fails in a micro-batch of FSDP2 joins the collectives of the others again.

Forwards and backwards of FSDP2 make the same collectives in the same order on all ranks, whatever the samples
are. A rank that stopped in the middle of a micro-batch runs it again on one sample. It leaves out the
collectives that it has made before, so it makes those that the others still wait for. The results have no
meaning: all ranks discard the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


class FSDPReplay:
    """The communication of models that FSDP2 alone has split: torch's default one, with a count.

    FSDP2 calls it as its `AllGather` and `ReduceScatter`. See `paceline.parallel.strategy.Replay`.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        self._roots = roots
        self._used: set[Any] = (
            set()
        )  # roots that have begun a forward; others have no state to reset
        self._done = 0  # collectives of this micro-batch
        self._leaves_out = 0  # the first of them, in a micro-batch that is run again
        for root in roots:
            root.register_forward_pre_hook(lambda root, _: self._used.add(root), prepend=True)
            for module in root.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_all_gather(self)  # type: ignore[arg-type]
                    module.set_custom_reduce_scatter(self)  # type: ignore[arg-type]

    def begin_micro_batch(self) -> None:
        self._done = 0
        if self._leaves_out:
            self._set_all_reduce(False)

    def repeat(self) -> None:
        self.reset()
        self._leaves_out = self._done

    def reset(self) -> None:
        for root in self._used:
            root.reset_iter_state()

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        work: dist.Work | None = None
        if self._done < self._leaves_out:
            # Values of plausible size, so that no layer refuses them.
            for part in torch.split(output_tensor, input_tensor.numel()):
                part.copy_(input_tensor[: part.numel()])
            if self._done + 1 == self._leaves_out:
                self._leaves_out = 0
                # With dp_replicate an all-reduce follows each reduce-scatter. FSDP2 has decided about that
                # of this one already.
                self._set_all_reduce(True)
        elif op is None:
            work = dist.all_gather_single(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
        else:
            work = dist.reduce_scatter_single(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        self._done += 1
        return work

    def _set_all_reduce(self, on: bool) -> None:
        for root in self._roots:
            root.set_requires_all_reduce(on)
