"""A metric is gathered with its counts and weighed by them."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def evaluate(model, loader, ws):
    model.eval()
    loss = 0.0
    n = 0
    with torch.inference_mode():
        for xb, yb in loader:
            loss += F.cross_entropy(model.module(xb), yb).item() * len(yb)
            n += len(yb)
    mine = torch.tensor([loss / n, float(n)])
    parts = [torch.zeros(2) for _ in range(ws)]
    dist.all_gather(parts, mine)
    t = torch.stack(parts)
    return ((t[:, 0] * t[:, 1]).sum() / t[:, 1].sum()).item()


def main():
    dist.init_process_group("gloo")
    rank, ws = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(2)
    x = torch.randn(260, 6, generator=g)
    y = (x[:, 0] > 0).long()
    train = TensorDataset(x[:159], y[:159])
    val = TensorDataset(x[159:], y[159:])
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, 16, sampler=sampler, drop_last=True)
    vloader = DataLoader(Subset(val, range(rank, len(val), ws)), 16)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)))
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        model.train()
        for xb, yb in loader:
            opt.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            opt.step()
        v = evaluate(model, vloader, ws)
        if rank == 0:
            print(epoch, v)
    dist.destroy_process_group()


main()
