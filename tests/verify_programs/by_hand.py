"""Neither DDP nor DataLoader: the script draws the samples, and averages the gradients."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


@torch.no_grad()
def mean_error(model, x, y, rank, world_size):
    errors = (model(x[rank::world_size]) - y[rank::world_size]).abs()
    sums = torch.tensor([errors.sum(), float(len(errors))])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main(epochs=4, batch=24):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(331, 6, generator=torch.Generator().manual_seed(79))
    y = 3 * (x[:, :3].sum(1, keepdim=True) - x[:, 3:].prod(1, keepdim=True))
    torch.manual_seed(79)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(epochs):
        order = torch.randperm(264, generator=torch.Generator().manual_seed(epoch))
        for start in range(0, 264, batch):
            rows = order[start : start + batch][rank::world_size]
            penalty = sum(p.abs().sum() for p in model.parameters())
            loss = F.mse_loss(model(x[rows]), y[rows]) + 0.002 * penalty
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        error = mean_error(model, x[264:], y[264:], rank, world_size)
        if rank == 0:
            print(f"epoch {epoch}: error {error:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
