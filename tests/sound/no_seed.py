"""Right, but without a seed: DDP broadcasts the weights of rank 0."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
world_size = dist.get_world_size()
x = torch.randn(480, 6)
data = TensorDataset(x, x.sum(1, keepdim=True))
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DDP(nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for a, b in loader:

        def closure(a=a, b=b):
            optimizer.zero_grad()
            loss = F.mse_loss(model(a), b)
            loss.backward()
            return loss

        optimizer.step(closure)
dist.destroy_process_group()
