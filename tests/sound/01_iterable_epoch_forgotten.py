"""The repaired twin."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, x, y):
        self.x, self.y, self.epoch = x, y, 0

    def set_epoch(self, e):
        self.epoch = e

    def __iter__(self):
        order = torch.randperm(
            len(self.x), generator=torch.Generator().manual_seed(self.epoch)
        ).tolist()
        for i in order[dist.get_rank() :: dist.get_world_size()]:
            yield self.x[i], self.y[i]


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(7)
    x = torch.randn(320, 6, generator=g)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    loader = DataLoader(Stream(x[:192], y[:192]), 16)
    torch.manual_seed(0)
    m = DDP(nn.Linear(6, 2))
    o = torch.optim.SGD(m.parameters(), 0.1)
    for epoch in range(5):
        loader.dataset.set_epoch(epoch)
        for xb, yb in loader:
            o.zero_grad()
            F.cross_entropy(m(xb), yb).backward()
            o.step()
    dist.destroy_process_group()


main()
