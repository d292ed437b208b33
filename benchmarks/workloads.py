"""Models that several benchmarks train."""

from __future__ import annotations

import torch
from torch import nn


def mlp() -> nn.Module:
    """For **comm** and **amx**: 16.8 MB of weights, little computation per weight."""
    return nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(1024, 1024), nn.GELU())])


class Transformer(nn.Module):
    """For **comp**: a transformer with d 256 and 4 layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out
