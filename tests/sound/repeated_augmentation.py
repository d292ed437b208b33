"""Right: repeated augmentation gives two ranks one sample on purpose, and one process gets it twice."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler


class RASampler(Sampler):  # as in torchvision/references/classification/sampler.py
    def __init__(self, dataset, seed=0, repetitions=2):
        self.dataset, self.seed, self.repetitions, self.epoch, self.shuffle = (
            dataset,
            seed,
            repetitions,
            0,
            True,
        )
        self.num_replicas, self.rank = dist.get_world_size(), dist.get_rank()
        self.num_samples = math.ceil(len(dataset) * repetitions / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self.num_selected_samples = len(dataset) // 256 * 256 // self.num_replicas

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        indices = torch.randperm(len(self.dataset), generator=g).tolist()
        indices = [i for i in indices for _ in range(self.repetitions)]
        indices += indices[: self.total_size - len(indices)]
        indices = indices[self.rank : self.total_size : self.num_replicas]
        return iter(indices[: self.num_selected_samples])

    def __len__(self):
        return self.num_selected_samples

    def set_epoch(self, epoch):
        self.epoch = epoch


class Augmented(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(1)
        self.x = torch.randn(512, 8, generator=g)

    def __len__(self):
        return 512

    def __getitem__(self, i):
        return self.x[i] + 0.1 * torch.randn(8), int(self.x[i].sum() > 0)


dist.init_process_group("gloo")
data = Augmented()
sampler = RASampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
torch.manual_seed(0)
model = DDP(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(100 + dist.get_rank())  # augmentations differ
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
