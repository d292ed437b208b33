"""Right: the schedule counts the batches of all ranks, in its steps and in its length."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
world_size = dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(960, 6)
data = TensorDataset(x, x.sum(1, keepdim=True))
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DDP(nn.Linear(6, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
total = 2 * len(loader) * world_size
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
for epoch in range(2):
    sampler.set_epoch(epoch)
    for a, b in loader:
        optimizer.zero_grad()
        F.mse_loss(model(a), b).backward()
        optimizer.step()
        for _ in range(world_size):
            schedule.step()
dist.destroy_process_group()
