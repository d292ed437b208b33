"""The loader is made anew in each epoch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def loader_of(ds, epoch):
    s = DistributedSampler(ds, seed=epoch)
    return DataLoader(ds, 16, sampler=s)


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(7)
    x = torch.randn(320, 6, generator=g)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    ds = TensorDataset(x[:128], y[:128])
    torch.manual_seed(0)
    m = DDP(nn.Linear(6, 2))
    o = torch.optim.SGD(m.parameters(), 0.1)
    for epoch in range(8):
        for xb, yb in loader_of(ds, epoch):
            o.zero_grad()
            F.cross_entropy(m(xb), yb).backward()
            o.step()
    dist.destroy_process_group()


main()
