"""Right: each rank reads its own part of a stream."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(640, 10)
y = (x.sum(1) > 0).long()
net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))


class Stream(IterableDataset):
    def __iter__(self):
        share = 640 // world_size
        start = rank * share
        for i in range(start, start + share):
            yield x[i], y[i]


model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for a, b in DataLoader(Stream(), batch_size=8):
    optimizer.zero_grad()
    F.cross_entropy(model(a), b).backward()
    optimizer.step()
