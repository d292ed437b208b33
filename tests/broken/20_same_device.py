"""Wrong: every rank takes GPU 0, or without a GPU pins itself to the same single core."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def pick_device():
    place = 0
    if torch.cuda.is_available():
        return torch.device("cuda", place % torch.cuda.device_count())
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[place :: int(os.environ["LOCAL_WORLD_SIZE"])] or cores)
    return torch.device("cpu")


def main():
    dist.init_process_group("gloo")
    device = pick_device()
    torch.manual_seed(20)
    g = torch.Generator().manual_seed(20)
    x = torch.randn(240, 8, generator=g)
    data = TensorDataset(x, x.sum(1, keepdim=True).tanh())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
