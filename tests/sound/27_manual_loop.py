"""Right: a loop without DataLoader or DDP; gradients are averaged in one flat all_reduce."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector


def average_gradients(parameters, world_size):
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat)
    flat /= world_size
    offset = 0
    for p in parameters:
        p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
        offset += p.numel()


def main():
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    g = torch.Generator().manual_seed(27)
    x = torch.rand(288, 3, generator=g)
    y = (x[:, :1] * x[:, 1:2] - x[:, 2:]).sin()
    torch.manual_seed(27)
    net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    global_batch = 24
    per_rank = global_batch // world_size
    for epoch in range(2):
        order = torch.randperm(288, generator=torch.Generator().manual_seed(1000 + epoch))
        for start in range(rank * per_rank, 288, global_batch):
            index = order[start : start + per_rank]
            loss = F.mse_loss(net(x[index]), y[index])
            optimizer.zero_grad()
            loss.backward()
            average_gradients(list(net.parameters()), world_size)
            optimizer.step()
        if rank == 0:
            norm = parameters_to_vector(net.parameters()).detach().norm().item()
            print(epoch, loss.item(), norm)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
