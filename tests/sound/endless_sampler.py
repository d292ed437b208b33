"""A sampler that never ends, of which each rank takes its part."""

import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class TrainingSampler(Sampler):
    def __init__(self, size, seed=0):
        self._size, self._seed = size, seed
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()

    def __iter__(self):
        yield from itertools.islice(self._infinite(), self._rank, None, self._world_size)

    def _infinite(self):
        g = torch.Generator()
        g.manual_seed(self._seed)
        while True:
            yield from torch.randperm(self._size, generator=g).tolist()


dist.init_process_group("gloo")
g = torch.Generator().manual_seed(5)
x = torch.randn(100, 4, generator=g)
y = x.sum(1, keepdim=True)
loader = iter(DataLoader(TensorDataset(x, y), batch_size=10, sampler=TrainingSampler(100)))
torch.manual_seed(0)
model = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), 0.05)
for it in range(40):
    xb, yb = next(loader)
    loss = F.mse_loss(model(xb), yb)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 10 == 0 and dist.get_rank() == 0:
        print(it, loss.item())
dist.destroy_process_group()
