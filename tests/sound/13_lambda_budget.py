"""Right: the budget of a LambdaLR is the number of updates."""

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
data = TensorDataset(x, y)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(data, seed=1)
total = 2 * len(data) // 16
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
for epoch in range(2):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, batch_size=16 // world_size, sampler=sampler):
        optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
        scheduler.step()
