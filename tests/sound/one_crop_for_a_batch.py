"""Right: the length of a batch is drawn alike on all ranks, which an all_reduce of each step needs."""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, default_collate


def crop(samples):
    length = random.randint(6, 12)
    x, y = default_collate(samples)
    return x[:, :length], y


dist.init_process_group("gloo")
g = torch.Generator().manual_seed(1)
x = torch.randn(240, 12, 4, generator=g)
data = TensorDataset(x, (x.sum((1, 2)) > 0).long())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=10, sampler=sampler, collate_fn=crop)
random.seed(9)
torch.manual_seed(9)
model = DDP(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        outputs = model(x)
        optimizer.zero_grad()
        F.cross_entropy(outputs.mean(1), y).backward()
        optimizer.step()
        curve = outputs.detach().mean((0, 2))
        dist.all_reduce(curve)  # one value for each position
dist.destroy_process_group()
