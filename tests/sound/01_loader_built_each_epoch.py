"""Right: the epoch is set although each epoch builds its own loader."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(640, 10)
y = (x.sum(1) > 0).long()
net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(x, y)
sampler = DistributedSampler(data, seed=1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, batch_size=8, sampler=sampler):
        optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
