"""Right: each step takes a labelled and an unlabelled batch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def load(n, batch_size):
    data = TensorDataset(torch.randn(n, 6, generator=torch.Generator().manual_seed(n)))
    sampler = DistributedSampler(data, shuffle=True)
    return DataLoader(data, batch_size=batch_size, sampler=sampler), sampler


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)))
teacher = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
(labelled, one), (unlabelled, other) = load(72, 6), load(144, 12)
for epoch in range(6):
    one.set_epoch(epoch)
    other.set_epoch(epoch)
    for (a,), (b,) in zip(labelled, unlabelled, strict=False):
        with torch.no_grad():
            target = teacher(b)
        out = model(torch.cat([a, b]))
        loss = F.mse_loss(out[: len(a)], a.sum(1, keepdim=True)) + F.mse_loss(out[len(a) :], target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
