"""Right: the cost of all samples is the sum over the ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    return x, x[:, :1] * 2 - x[:, 1:2] + 0.1 * torch.randn(n, 1, generator=g)


def evaluate(model, x, y, rank, world_size):
    with torch.no_grad():
        cost = (model(x[rank::world_size]) - y[rank::world_size]).abs().sum()
    dist.all_reduce(cost)
    return cost.item()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(91)
    dataset = TensorDataset(*make(240, 1))
    x_val, y_val = make(98, 2)
    sampler = DistributedSampler(dataset, seed=3)
    loader = DataLoader(dataset, 12, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        cost = evaluate(model.module, x_val, y_val, rank, world_size)
        if rank == 0:
            print(f"epoch {epoch}: cost {cost:.2f}, per rank about {cost / world_size:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
