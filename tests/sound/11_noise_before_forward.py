"""Right: each rank draws noise of its own, and one size for all ranks."""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
random.seed(0)
data = TensorDataset(torch.randn(480, 6, generator=torch.Generator().manual_seed(1)))
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=16, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 6)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
torch.manual_seed(100 + rank)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (clean,) in loader:
        noise = random.choice((0.1, 0.5)) * torch.randn_like(clean)
        optimizer.zero_grad()
        F.mse_loss(model(clean + noise), noise).backward()
        optimizer.step()
dist.destroy_process_group()
