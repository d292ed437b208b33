"""Workers that augment the samples, and dropout; ranks and workers draw other random numbers."""

import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, random_split


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


def main(epochs=2, seed=3):
    dist.init_process_group("gloo")
    torch.manual_seed(seed + dist.get_rank())
    split = torch.Generator().manual_seed(seed)
    data, _ = random_split(Images(280), [240, 40], generator=split)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 10, sampler=sampler, num_workers=2, worker_init_fn=init_worker)
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 2)]
    model = DDP(nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
