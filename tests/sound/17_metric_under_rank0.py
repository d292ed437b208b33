"""Right: every rank reduces the loss, and rank 0 prints it."""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()
g = torch.Generator().manual_seed(1)
x = torch.randn(240, 5, generator=g)
dataset = TensorDataset(x, (x[:, 0] > 0).long())
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=20, sampler=sampler)
torch.manual_seed(1)
model = DDP(nn.Linear(5, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(2):
    sampler.set_epoch(epoch)
    totals = torch.zeros(2)
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
        totals += torch.tensor([loss.item() * len(yb), len(yb)])
    dist.all_reduce(totals)
    if rank == 0:
        print(epoch, (totals[0] / totals[1]).item())

dist.destroy_process_group()
