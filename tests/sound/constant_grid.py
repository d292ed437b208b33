"""Right: each rank takes its own rows without a DataLoader, beside a grid that never changes."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Operator(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(1, 16)
        self.branch = nn.Linear(6, 16)

    def forward(self, grid, fields):
        return self.branch(fields) @ torch.tanh(self.trunk(grid)).T


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    fields = torch.randn(288, 6)
    targets = torch.tanh(fields @ torch.randn(6, 32))
    grid = torch.linspace(0, 1, 32)[:, None]
    model = DDP(Operator())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(4):
        order = torch.randperm(len(fields), generator=torch.Generator().manual_seed(epoch))
        for rows in order[rank::world].split(16):
            optimizer.zero_grad()
            F.mse_loss(model(grid, fields[rows]), targets[rows]).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
