"""Each rank draws files with replacement from all files, as WebDataset's ResampledShards does."""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

FILES, ROWS = 14, 16


def rows_of(file):
    g = torch.Generator().manual_seed(file)
    x = torch.randn(ROWS, 4, generator=g)
    return [(row, row.sum().reshape(1)) for row in x]


class Resampled(IterableDataset):
    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        draw = random.Random(100 + self.rank)
        while True:
            yield from rows_of(draw.randrange(FILES))


def main(steps=40):
    dist.init_process_group("gloo")
    loader = iter(DataLoader(Resampled(dist.get_rank()), batch_size=8))
    torch.manual_seed(1)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        x, y = next(loader)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
