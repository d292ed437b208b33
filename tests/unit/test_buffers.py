"""`Buffers` undoes what a forward has done to the buffers of a model."""

from __future__ import annotations

import torch
from torch import nn

from paceline.parallel.buffers import Buffers


class _Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("changed", torch.zeros(2))
        self.register_buffer("assigned", torch.zeros(2))
        self.register_buffer("grows", torch.zeros(1))

    def forward(self) -> None:
        self.changed += 1
        self.assigned = self.assigned + 1
        self.grows = torch.cat([self.grows, self.grows])


def test_a_forward_is_undone_also_if_it_assigns_its_buffers() -> None:
    model = _Statistics()
    buffers = Buffers([model])
    for num_forwards in range(3):
        buffers.keep()
        model()
        buffers.restore()
        assert torch.equal(model.changed, torch.full((2,), float(num_forwards)))
        assert torch.equal(model.assigned, model.changed)
        assert len(model.grows) == 2**num_forwards
        model()
