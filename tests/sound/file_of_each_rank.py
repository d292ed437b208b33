"""Each rank reads a file of its own, and augments."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class File(Dataset):
    """Each rank reads its own part-0000N file, and adds noise."""

    def __init__(self, part, n):
        g = torch.Generator().manual_seed(700 + part)
        self.x = torch.randn(n, 6, generator=g)
        self.y = (self.x.sum(1) > 0).long().tolist()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + 0.05 * torch.randn(6), self.y[i]


def main():
    dist.init_process_group("gloo")
    rank, _ws = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7 + rank)
    loader = DataLoader(File(rank, 160), batch_size=16, shuffle=True, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 2)))
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for _epoch in range(3):
        for xb, yb in loader:
            opt.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
