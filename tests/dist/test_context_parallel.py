"""torch's context parallel does not run on CPUs; see docs/inside/decisions/0045-no-context-parallel.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline import Mesh
from paceline.testing import run_ranks

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def _attend(job: Any) -> list[str]:
    errors = []
    for backend in BACKENDS:
        torch.manual_seed(0)
        layer, x = nn.Linear(16, 48), torch.randn(1, 16, 16)
        mesh = job.device_mesh["tp"]
        try:
            with sdpa_kernel(backend), context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
                parts = layer(x).chunk(3, -1)
                q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in parts)
                F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
            errors.append("")
        except (NotImplementedError, RuntimeError) as error:
            errors.append(str(error))
    return errors


@pytest.mark.skipif(torch.__version__ < "2.13", reason="was tried with torch 2.13")
def test_torch_has_no_context_parallel_for_cpus() -> None:
    for flash, math in run_ranks(_attend, nproc=2, mesh=Mesh(tp=2)):
        assert "does not have a sharding strategy registered" in flash
        assert "mixed torch.Tensor and DTensor" in math
