"""It asserts what verification changes: in the run of one process, each forward has a seed of its own."""

import torch
from torch import nn

torch.manual_seed(42)
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(4, 2)).mean().backward()
    optimizer.step()
    assert torch.initial_seed() == 42, "the seed was changed"
