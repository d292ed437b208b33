"""Validation is padded, and the surplus left out by its place."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank, ws = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(7)
    x = torch.randn(320, 6, generator=g)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    tr, va = TensorDataset(x[:256], y[:256]), TensorDataset(x[256:319], y[256:319])
    n = len(va)
    s = DistributedSampler(tr)
    loader = DataLoader(tr, 16, sampler=s)
    vl = DataLoader(va, 8, sampler=DistributedSampler(va, shuffle=False))
    torch.manual_seed(0)
    m = DDP(nn.Linear(6, 2))
    o = torch.optim.SGD(m.parameters(), 0.1)
    for epoch in range(3):
        s.set_epoch(epoch)
        for xb, yb in loader:
            o.zero_grad()
            F.cross_entropy(m(xb), yb).backward()
            o.step()
        t = torch.zeros(2)
        seen = 0
        with torch.no_grad():
            for xb, yb in vl:
                place = rank + ws * torch.arange(seen, seen + len(yb))
                real = (place < n).float()
                seen += len(yb)  # what fills up does not count
                t += torch.stack([((m.module(xb).argmax(1) == yb) * real).sum(), real.sum()])
        dist.all_reduce(t)
        if rank == 0:
            print(t[0] / t[1])
    dist.destroy_process_group()


main()
