"""Samples are drawn with replacement, by weight, and dealt to the ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class DistributedWeightedSampler(Sampler):
    def __init__(self, weights, num_samples, seed=0):
        self.weights, self.total, self.seed, self.epoch = (
            torch.as_tensor(weights),
            num_samples,
            seed,
            0,
        )
        self.num_replicas, self.rank = dist.get_world_size(), dist.get_rank()

    def set_epoch(self, e):
        self.epoch = e

    def __len__(self):
        return self.total // self.num_replicas

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        idx = torch.multinomial(self.weights, self.total, replacement=True, generator=g).tolist()
        return iter(idx[self.rank : len(self) * self.num_replicas : self.num_replicas])


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(14)
    x = torch.randn(200, 6, generator=g)
    y = (x[:, 0] > 1).long()
    n = torch.bincount(y).float()
    sampler = DistributedWeightedSampler((1 / n)[y], 200)
    loader = DataLoader(TensorDataset(x, y), 16, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Linear(6, 2))
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            opt.step()
    dist.destroy_process_group()


main()
