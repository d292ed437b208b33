"""Wrong: the loss of a compiled model is divided by the world size, and DDP averages the gradients too."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
world_size = int(os.environ["WORLD_SIZE"])
torch.manual_seed(1)
x = torch.randn(96, 5)
data = TensorDataset(x, x.sum(1, keepdim=True))
raw = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 1))
model = torch.compile(DDP(raw))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)


@torch.compile
def loss_of(output, target):
    return nn.functional.mse_loss(output, target)


for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = loss_of(model(a), b) / world_size
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    raw.eval()
    with torch.no_grad():
        print(raw(x).mean())
    raw.train()
dist.destroy_process_group()
