"""The repaired twin."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    g = torch.Generator().manual_seed(7)
    x = torch.randn(320, 6, generator=g)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    ds = TensorDataset(x[:256], y[:256])
    s = DistributedSampler(ds)
    loader = DataLoader(ds, 32, sampler=s)
    torch.manual_seed(0)
    m = DDP(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    o = torch.optim.SGD(m.parameters(), 0.5)
    for epoch in range(4):
        s.set_epoch(epoch)
        m.train()
        for xb, yb in loader:
            o.zero_grad()
            F.cross_entropy(m(xb), yb).backward()
            o.step()
        if rank == 0:
            m.eval()
            with torch.no_grad():
                for i in range(256, 320, 16):
                    F.cross_entropy(m.module(x[i : i + 16]), y[i : i + 16])
        dist.barrier()
    dist.destroy_process_group()


main()
