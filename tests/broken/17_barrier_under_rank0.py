"""Wrong: rank 0 alone calls the barrier after it saved, so it waits for ever."""

import os
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def save(model, folder):
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), os.path.join(folder, "model.pt"))
        dist.barrier()


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    torch.manual_seed(17)
    g = torch.Generator().manual_seed(17)
    x = torch.randn(192, 4, generator=g)
    data = TensorDataset(x, x.sum(1, keepdim=True).cos())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
            save(model, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
