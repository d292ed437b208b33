"""Right: both optimizers are unscaled before all gradients are clipped."""

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
model = DDP(net)
first = torch.optim.SGD(net[0].parameters(), lr=0.1)
last = torch.optim.SGD(net[2].parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
data = TensorDataset(x, y)
for a, b in DataLoader(data, batch_size=8, sampler=DistributedSampler(data, seed=1)):
    first.zero_grad()
    last.zero_grad()
    scaler.scale(F.cross_entropy(model(a), b)).backward()
    scaler.unscale_(first)
    scaler.unscale_(last)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(first)
    scaler.step(last)
    scaler.update()
