"""A pass without gradient over the training data, for its accuracy."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank, _ws = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(8)
    x = torch.randn(128, 6, generator=g)
    y = (x[:, 0] > 0).long()
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Linear(6, 2))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        model.train()
        for xb, yb in loader:
            opt.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            opt.step()
        model.eval()
        c = torch.zeros(2)
        with torch.no_grad():
            for xb, yb in loader:
                c += torch.tensor([(model(xb).argmax(1) == yb).sum(), len(yb)])
        dist.all_reduce(c)
        if rank == 0:
            print("train accuracy", (c[0] / c[1].clamp(min=1)).item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
