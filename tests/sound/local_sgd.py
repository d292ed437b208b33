"""Weights are averaged every few steps (local SGD)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def average(net):
    for p in net.parameters():
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()


def main(every=4):
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(22)
    x = torch.randn(320, 6, generator=g)
    y = (x[:, 0] > 0).long()
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    opt = torch.optim.SGD(net.parameters(), 0.1)
    step = 0
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            F.cross_entropy(net(xb), yb).backward()
            opt.step()
            step += 1
            if step % every == 0:
                average(net)
    average(net)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
