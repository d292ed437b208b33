"""Right: DDP broadcasts rank 0's statistics, and rank 0 alone evaluates, without a collective."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(16)
    g = torch.Generator().manual_seed(16)
    x = torch.randn(300, 1, 6, 6, generator=g)
    y = (x.mean((1, 2, 3)) > 0).long()
    train, test = TensorDataset(x[:216], y[:216]), TensorDataset(x[216:], y[216:])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=9, sampler=sampler)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)
    )
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if rank == 0:
            net.eval()
            with torch.no_grad():
                right = sum((net(x).argmax(1) == y).sum() for x, y in DataLoader(test, 32))
            print(epoch, right.item() / len(test))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
