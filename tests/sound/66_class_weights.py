"""Right: the weights of the classes come from all labels."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g) * 3 + 1
    return x, (x[:, 0] + x[:, 1] / 2 > 2).long() + (x[:, 2] > 3).long()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(66)
    x, y = make(240, 1)
    x_val, y_val = make(96, 2)
    counts = torch.bincount(y, minlength=3)
    sampler = DistributedSampler(TensorDataset(x, y), seed=3)
    loader = DataLoader(TensorDataset(x, y), 16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)))
    criterion = nn.CrossEntropyLoss(weight=len(y) / (3 * counts))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()
        with torch.no_grad():
            right = model.module(x_val[rank::world_size]).argmax(1) == y_val[rank::world_size]
        counts = torch.tensor([right.sum(), len(right)])
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {counts[0] / counts[1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
