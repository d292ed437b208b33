"""Right: all micro-batches but the one before the step are inside no_sync."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
accumulate = 4
generator = torch.Generator().manual_seed(9)
x = torch.randn(384, 8, generator=generator)
y = torch.sin(x).sum(1, keepdim=True)
data = TensorDataset(x, y)
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=8, sampler=sampler)
torch.manual_seed(9)
model = DDP(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (xb, yb) in enumerate(loader):
        syncs = (i + 1) % accumulate == 0
        with contextlib.nullcontext() if syncs else model.no_sync():
            loss = F.mse_loss(model(xb), yb) / accumulate
            loss.backward()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()

if dist.get_rank() == 0:
    print("last loss", loss.item())
dist.destroy_process_group()
