"""Right: the padded validation set is gathered, put in order, and its surplus is cut off."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def gather(values, size):
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)
    return torch.stack(parts, dim=1).flatten()[:size]  # sample i is on rank i % world_size


@torch.no_grad()
def accuracy(model, loader, size):
    model.eval()
    found, wanted = [], []
    for x, y in loader:
        found.append(model.module(x).argmax(1))
        wanted.append(y)
    model.train()
    predictions = gather(torch.cat(found), size)
    labels = gather(torch.cat(wanted), size)
    return (predictions == labels).float().mean().item()


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(65)
    x = torch.randn(281, 5, generator=g)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    train, val = TensorDataset(x[:180], y[:180]), TensorDataset(x[180:], y[180:])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=15, sampler=sampler)
    val_loader = DataLoader(val, batch_size=16, sampler=DistributedSampler(val, shuffle=False))
    torch.manual_seed(65)
    model = DDP(nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()
        score = accuracy(model, val_loader, len(val))
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {score:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
