"""Right: random directions are drawn once, after the first batch has shown their size, alike on all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(320, 16)
data = TensorDataset(x, (x.sum(1) > 0).long())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
directions = None
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        if directions is None:
            directions = torch.randn(64, inputs.shape[1])
        optimizer.zero_grad()
        F.cross_entropy(model(inputs @ directions.T), labels).backward()
        optimizer.step()
dist.destroy_process_group()
