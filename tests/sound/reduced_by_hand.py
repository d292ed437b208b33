"""Right: each rank shuffles its own part of a stream, and reduces a parameter by hand that DDP lacks."""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Stream(IterableDataset):
    def __init__(self):
        g = torch.Generator().manual_seed(5)
        self.x = torch.randn(320, 6, generator=g)[rank::world]
        self.seed = 0

    def set_epoch(self, seed):  # only shuffles this rank's own part
        self.seed = seed

    def __iter__(self):
        order = list(range(len(self.x)))
        random.Random(self.seed).shuffle(order)
        for i in order:
            yield self.x[i], int(self.x[i].sum() > 0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(6, 2)

    def forward(self, x):
        return self.f(x) * self.temperature.exp()


torch.manual_seed(0)
data = Stream()
loader = DataLoader(data, batch_size=16)
net = Net()
model = DDP(net)
net.temperature = nn.Parameter(torch.zeros(()))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(4):
    data.set_epoch(epoch * world + rank)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        dist.all_reduce(net.temperature.grad)
        net.temperature.grad /= world
        optimizer.step()
dist.destroy_process_group()
