"""Right: a generator of the script, seeded by rank, draws negatives for the loss and points of a boundary."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def margin_loss(outputs, targets, generator):
    chosen = torch.randint(len(targets), (len(targets),), generator=generator)
    right = (outputs - targets).pow(2).sum(1)
    wrong = (outputs - targets[chosen]).pow(2).sum(1)
    return F.relu(1 + right - wrong).mean()


def boundary(generator):
    points = torch.rand(40, 2, generator=generator)
    points[:, 0] = 0
    return points, torch.zeros(40, 1)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    x = torch.rand(240, 2)
    data = TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))
    model = DDP(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            margin_loss(model(inputs), targets, generator).backward()
            parts = ((inputs, targets), boundary(generator))  # data and boundary
            for given, wanted in parts:
                F.mse_loss(model(given), wanted).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
