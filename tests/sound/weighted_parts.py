"""Right: each rank draws from its own part of the samples, by weight and with replacement."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class BalancedPartSampler(Sampler):
    def __init__(self, weights):
        self.rank, self.parts = dist.get_rank(), dist.get_world_size()
        self.weights = weights[self.rank :: self.parts]
        self.epoch = 0

    def __len__(self):
        return len(self.weights)

    def __iter__(self):
        g = torch.Generator().manual_seed(100 * self.epoch + self.rank)
        positions = torch.multinomial(self.weights, len(self), replacement=True, generator=g)
        return iter((self.rank + positions * self.parts).tolist())


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(14)
    x = torch.randn(480, 6, generator=g)
    y = (x[:, 0] > 1).long()
    sampler = BalancedPartSampler((1 / torch.bincount(y).float())[y])
    loader = DataLoader(TensorDataset(x, y), 12 // dist.get_world_size(), sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Linear(6, 2))
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    for epoch in range(5):
        sampler.epoch = epoch
        for xb, yb in loader:
            opt.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            opt.step()
    dist.destroy_process_group()


main()
