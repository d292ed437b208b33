"""Batches have time first."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def collate(items):
    return torch.stack([a for a, _ in items], 1), torch.tensor([b for _, b in items])  # T x B x F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.r = nn.GRU(3, 8)
        self.o = nn.Linear(8, 2)

    def forward(self, x):
        return self.o(self.r(x)[0][-1])


def main(global_batch=32):
    dist.init_process_group("gloo")
    ws = dist.get_world_size()
    g = torch.Generator().manual_seed(17)
    x = torch.randn(320, 7, 3, generator=g)
    y = (x.sum((1, 2)) > 0).long()
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, global_batch // ws, sampler=sampler, collate_fn=collate)
    torch.manual_seed(0)
    model = DDP(Net())
    opt = torch.optim.AdamW(model.parameters(), 1e-2)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            (F.cross_entropy(model(xb), yb, reduction="sum") * ws / global_batch).backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
