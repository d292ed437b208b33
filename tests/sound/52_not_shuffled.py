"""Shards that are not shuffled, though the epoch is told."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    dist.get_rank()
    g = torch.Generator().manual_seed(7)
    x = torch.randn(320, 6, generator=g)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    ds = TensorDataset(x, y)
    s = DistributedSampler(ds, shuffle=False)
    loader = DataLoader(ds, 16, sampler=s)
    torch.manual_seed(0)
    m = DDP(nn.Linear(6, 2))
    o = torch.optim.SGD(m.parameters(), 0.1)
    for epoch in range(4):
        s.set_epoch(epoch)
        for xb, yb in loader:
            o.zero_grad()
            F.cross_entropy(m(xb), yb).backward()
            o.step()
    dist.destroy_process_group()


main()
