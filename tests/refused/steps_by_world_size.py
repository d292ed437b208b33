"""By design it takes 24 // world_size**2 steps, so each process count takes another number."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(240, 4, generator=g)
    y = x.sum(1, keepdim=True)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    total_steps = 24 // world_size**2
    for step in range(total_steps):
        first = 10 * (step * world_size + rank)
        optimizer.zero_grad()
        F.mse_loss(model(x[first : first + 10]), y[first : first + 10]).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
