"""Right: the script looks at a batch before it trains, and its epochs are longer than the watched steps."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
world_size = dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(6400, 10)
data = TensorDataset(x, (x.sum(1) > 0).long())
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, batch_size=8, sampler=sampler)
first, _ = next(iter(loader))
net = nn.Sequential(nn.Linear(first.shape[1], 32), nn.ReLU(), nn.Linear(32, 2))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
dist.destroy_process_group()
