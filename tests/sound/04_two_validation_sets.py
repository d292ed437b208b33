"""Right: each rank evaluates every N-th sample of a large and of a small set, without padding."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
g = torch.Generator().manual_seed(7)


def make(samples):
    x = torch.randn(samples, 8, generator=g)
    return TensorDataset(x, (x[:, 0] > 0).long())


def validation(samples):
    data = make(samples)
    indices = range(rank, samples, world_size)
    return DataLoader(Subset(data, indices), batch_size=64)


train = make(240)
sampler = DistributedSampler(train, seed=7)
loader = DataLoader(train, batch_size=12, sampler=sampler)
sets = [validation(2001), validation(5)]
torch.manual_seed(7)
model = DDP(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for batches in sets:
        counts = torch.zeros(2)
        with torch.no_grad():
            for x, y in batches:
                counts += torch.tensor([(model.module(x).argmax(1) == y).sum(), len(x)])
        dist.all_reduce(counts)
        if rank == 0:
            print(f"accuracy {(counts[0] / counts[1]).item():.3f}")
dist.destroy_process_group()
