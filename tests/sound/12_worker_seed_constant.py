"""Right: worker_init_fn seeds every worker from torch's seed, which differs by rank and worker."""

import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    def __init__(self, count):
        g = torch.Generator().manual_seed(12)
        self.images = torch.rand(count, 1, 6, 6, generator=g)
        self.labels = (self.images.mean((1, 2, 3)) > 0.5).long()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = self.images[i] + 0.05 * float(np.random.normal())
        return (image.flip(-1) if random.random() < 0.5 else image), self.labels[i]


def init_worker(worker_id):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3 + dist.get_rank())
    data = Images(192)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(
        data, batch_size=8, sampler=sampler, num_workers=2, worker_init_fn=init_worker
    )
    model = DDP(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
