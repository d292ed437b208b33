"""Rank 0 calls another model before training."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(9)
extractor = nn.Sequential(nn.Linear(4, 8), nn.Tanh()).eval().requires_grad_(False)
g = torch.Generator().manual_seed(9)
x = torch.randn(192, 4, generator=g)
data = TensorDataset(x)
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
if rank == 0:
    reference = extractor(x[:64]).mean(0)  # for the score that rank 0 prints
dist.barrier()
model = DDP(nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 4)))
opt = torch.optim.Adam(model.parameters(), 1e-2)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for (xb,) in loader:
        opt.zero_grad()
        F.mse_loss(model(xb), xb).backward()
        opt.step()
    if rank == 0:
        with torch.no_grad():
            print(epoch, (extractor(model.module(x[:64])).mean(0) - reference).norm().item())
    dist.barrier()
dist.destroy_process_group()
