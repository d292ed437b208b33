"""Right: a model with BatchNorm is wrapped in DDP."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(640, 10)
y = (x.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(x, y)
for a, b in DataLoader(data, batch_size=8, sampler=DistributedSampler(data, seed=1)):
    optimizer.zero_grad()
    F.cross_entropy(model(a), b).backward()
    optimizer.step()
