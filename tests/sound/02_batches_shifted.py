"""Right: each rank takes every world_size-th batch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(768, 10)
y = (x.sum(1) > 0).long()
net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [(x[i : i + 16], y[i : i + 16]) for i in range(0, 768, 16)]
mine = batches[rank::world_size]
for a, b in mine:
    optimizer.zero_grad()
    F.cross_entropy(model(a), b).backward()
    optimizer.step()
