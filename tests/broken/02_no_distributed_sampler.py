"""Wrong: each rank reads the whole set with the same generator, so all see the same samples."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])

g = torch.Generator().manual_seed(3)
inputs = torch.randn(288, 6, generator=g)
targets = inputs @ torch.randn(6, 1, generator=g)
dataset = TensorDataset(inputs, targets)
shard = dataset
order = torch.Generator().manual_seed(11)
train_loader = DataLoader(shard, batch_size=24 // world_size, shuffle=True, generator=order)

torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for epoch in range(2):
    total = 0.0
    for xb, yb in train_loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(xb), yb)
        loss.backward()
        optimizer.step()
        total += loss.item()
    if rank == 0:
        print("epoch", epoch, "loss", total / len(train_loader))

dist.destroy_process_group()
