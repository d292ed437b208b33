"""Wrong: gradients are summed by hand and never divided, so they are world_size times too big."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def sync_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(240, 4, generator=g)
    y = x.prod(1, keepdim=True)
    torch.manual_seed(42)
    model = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = 8
    for epoch in range(2):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        mine = order[rank::world_size]
        for start in range(0, len(mine), batch):
            index = mine[start : start + batch]
            optimizer.zero_grad()
            loss = F.mse_loss(model(x[index]), y[index])
            loss.backward()
            sync_gradients(model)
            optimizer.step()
        if rank == 0:
            print(epoch, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
