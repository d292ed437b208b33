"""Right: each micro-batch gives its sum over the size of the whole batch."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MICRO_BATCH = 8


def train_step(model, optimizer, x, y):
    micro_batches = list(zip(x.split(MICRO_BATCH), y.split(MICRO_BATCH), strict=True))
    optimizer.zero_grad()
    for i, (xm, ym) in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(xm), ym, reduction="sum") / len(x)
            loss.backward()
    optimizer.step()


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(2)
    x = torch.randn(240, 10, generator=g)
    data = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(data, seed=2)
    loader = DataLoader(data, batch_size=20, sampler=sampler)  # 8 + 8 + 4
    torch.manual_seed(2)
    model = DDP(nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            train_step(model, optimizer, x, y)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
