"""Wrong: the dataset's generator is copied into every worker, so all draw the same noise."""

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noisy(Dataset):
    def __init__(self, n):
        rng = np.random.default_rng(8)
        self.x = rng.normal(size=(n, 8)).astype(np.float32)
        self.y = (self.x.sum(1) > 0).astype(np.int64)
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        noise = self.rng.normal(scale=0.1, size=8).astype(np.float32)
        return self.x[i] + noise, self.y[i]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(100 + dist.get_rank())
    data = Noisy(216)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 9, sampler=sampler, num_workers=2)
    model = DDP(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
