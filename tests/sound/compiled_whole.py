"""nanoGPT's way to compile: `model.compile()`, a compiled step of the optimizer, a compiled function."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(1)
x = torch.randn(240, 5)
data = TensorDataset(x, x.sum(1, keepdim=True))
raw = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 1))
raw.compile(fullgraph=True)
model = DDP(raw)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
update = torch.compile(optimizer.step)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)


@torch.compile(fullgraph=True)
def loss_of(output, target):
    return nn.functional.mse_loss(output, target)


@torch.compile
def train_step(a, b):
    loss = loss_of(model(a), b)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss


for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        optimizer.zero_grad()
        train_step(a, b)
        update()
dist.destroy_process_group()
