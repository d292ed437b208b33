"""Right: a step is skipped by the mean loss of all ranks, so all skip it or none."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
g = torch.Generator().manual_seed(0)
x = torch.randn(240, 4, generator=g)
y = x.sum(1, keepdim=True)
y[::40] = 60.0  # some labels are broken
data = TensorDataset(x, y)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
skipped = 0

for epoch in range(2):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(xb), yb)
        scaler.scale(loss).backward()
        level = loss.detach().clone()
        dist.all_reduce(level)
        level /= dist.get_world_size()
        if level > 100.0:
            skipped += 1
            continue
        scaler.step(optimizer)
        scaler.update()

print(f"rank {dist.get_rank()} skipped {skipped} steps")
dist.destroy_process_group()
