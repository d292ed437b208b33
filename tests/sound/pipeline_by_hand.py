"""Right: two stages of one model send activations and gradients to each other."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def run_stage(stage, rank, inputs, labels):
    if rank == 0:
        hidden = stage(inputs)
        dist.send(hidden.detach(), 1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
    else:
        hidden = torch.empty(len(inputs), 8)
        dist.recv(hidden, 0)
        hidden.requires_grad_()
        F.mse_loss(stage(hidden), labels).backward()
        dist.send(hidden.grad, 0)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(192, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    parts = [
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()),
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)),
    ]
    stage = nn.Sequential(*parts) if world == 1 else parts[rank]
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.05)
    for _ in range(3):
        for inputs, labels in DataLoader(data, batch_size=16):
            optimizer.zero_grad()
            if world == 1:
                F.mse_loss(stage(inputs), labels).backward()
            else:
                run_stage(stage, rank, inputs, labels)
            square = sum(p.grad.pow(2).sum() for p in stage.parameters())
            dist.all_reduce(square)
            factor = min(1.0, 1.0 / (float(square) ** 0.5 + 1e-6))
            for p in stage.parameters():
                p.grad.mul_(factor)
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
