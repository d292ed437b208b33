"""Rank 0 goes backward through the bare model for a picture."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def saliency(net, x):
    net.eval()
    x = x.clone().requires_grad_(True)
    net(x).max(1).values.sum().backward()
    net.train()
    return x.grad.abs().mean(0)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    g = torch.Generator().manual_seed(25)
    x = torch.randn(192, 6, generator=g)
    y = (x[:, 0] > 0).long()
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Linear(6, 2))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            opt.step()
        if rank == 0:
            print(epoch, saliency(model.module, x[:8]))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
