"""DDP's own context for ranks with unequally many batches."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank, ws = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(13)
    x = torch.randn(160, 6, generator=g)
    y = (x[:, 0] > 0).long()
    shard = Subset(
        TensorDataset(x, y), list(range(160))[rank::ws] if rank else list(range(0, 160, ws))
    )
    if ws > 1 and rank == 1:
        shard = Subset(shard, range(60))
    torch.manual_seed(0)
    model = DDP(nn.Linear(6, 2))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(3):
        loader = DataLoader(shard, 10, shuffle=True, generator=torch.Generator().manual_seed(epoch))
        with model.join():
            for xb, yb in loader:
                opt.zero_grad()
                F.cross_entropy(model(xb), yb).backward()
                opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
