"""Throughput is reduced beside the accuracy."""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, ws = dist.get_rank(), dist.get_world_size()
g = torch.Generator().manual_seed(2)
x = torch.randn(260, 6, generator=g)
y = (x[:, 0] > 0).long()
train = TensorDataset(x[:160], y[:160])
val = TensorDataset(x[160:], y[160:])
sampler = DistributedSampler(train, seed=3)
loader = DataLoader(train, 16, sampler=sampler)
vloader = DataLoader(Subset(val, range(rank, len(val), ws)), 16)
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)))
opt = torch.optim.Adam(model.parameters(), 1e-3)
for epoch in range(6):
    sampler.set_epoch(epoch)
    model.train()
    t0 = time.perf_counter()
    n = 0
    for xb, yb in loader:
        opt.zero_grad(set_to_none=True)
        F.cross_entropy(model(xb), yb).backward()
        opt.step()
        n += len(xb)
    speed = torch.tensor(n / (time.perf_counter() - t0))
    model.eval()
    hits = torch.zeros(1)
    with torch.no_grad():
        for xb, yb in vloader:
            hits += (model.module(xb).argmax(1) == yb).sum()
    dist.all_reduce(hits)
    dist.all_reduce(speed)
    seconds = torch.tensor(time.perf_counter() - t0)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(
            epoch, hits.item() / len(val), f"{speed.item():.0f} samples/s, {seconds.item():.2f} s"
        )
dist.destroy_process_group()
