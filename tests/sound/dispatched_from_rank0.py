"""Rank 0 reads the stream and sends each rank its part of a batch, as Accelerate's dispatcher does."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        g = torch.Generator().manual_seed(1)
        for _ in range(960):
            x = torch.randn(5, generator=g)
            yield x, x.sum().reshape(1)


def dispatch(loader, rank, world_size):
    batches = iter(loader) if rank == 0 else None

    def fetch():
        batch = None
        if rank == 0:
            with contextlib.suppress(StopIteration):
                batch = next(batches)
        info = [batch is None]
        dist.broadcast_object_list(info)
        return batch, info[0]

    batch, is_over = fetch()
    while not is_over:
        given = [batch]
        dist.broadcast_object_list(given)
        batch, is_over = fetch()  # one batch ahead
        yield [t[rank::world_size] for t in given[0]]


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loader = DataLoader(Stream(), batch_size=12)
    torch.manual_seed(2)
    model = DDP(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in dispatch(loader, rank, world_size):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    total = sum(p.detach().sum() for p in model.parameters()).reshape(1)
    dist.all_reduce(total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
