"""Right: validation samples are dealt out without padding, and each is counted once."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def blobs(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    return TensorDataset(F.one_hot(y, 3) * 2 + torch.randn(n, 3, generator=g), y)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    totals = torch.zeros(3)
    for x, y in loader:
        out = model.module(x)
        loss = F.cross_entropy(out, y, reduction="sum")
        totals += torch.stack([loss, (out.argmax(1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(totals)
    model.train()
    return totals[0] / totals[2], totals[1] / totals[2]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, val = blobs(180, 0), blobs(101, 1)
    train_sampler = DistributedSampler(train, drop_last=True)
    val_shard = Subset(val, range(rank, len(val), world))
    val_loader = DataLoader(val_shard, batch_size=16)
    loader = DataLoader(train, batch_size=10, sampler=train_sampler, drop_last=True)
    torch.manual_seed(0)
    model = DDP(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        train_sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        loss, accuracy = validate(model, val_loader)
        if rank == 0:
            print(f"{epoch}: loss {loss:.4f} accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
