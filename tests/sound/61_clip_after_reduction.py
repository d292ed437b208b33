"""Right: gradients are clipped after the sum over the ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
world_size = dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(480, 6)
data = TensorDataset(x, 3 * x.sum(1, keepdim=True))
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        optimizer.zero_grad()
        F.mse_loss(model(a), b).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world_size
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
dist.destroy_process_group()
