"""Right: two tasks with batches of different sizes have the weight 0.5 each, by design."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def task(seed, column, batch_size, n):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    data = TensorDataset(x, (x[:, column] > 0).long())
    sampler = DistributedSampler(data)
    return sampler, DataLoader(data, batch_size, sampler=sampler)


def main():
    dist.init_process_group("gloo")
    tasks = [task(0, 0, 16, 384), task(1, 1, 8, 192)]
    torch.manual_seed(3)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for sampler, _ in tasks:
            sampler.set_epoch(epoch)
        for batches in zip(*(loader for _, loader in tasks), strict=True):
            optimizer.zero_grad()
            for x, y in batches:
                loss = 0.5 * F.cross_entropy(model(x), y)
                loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
