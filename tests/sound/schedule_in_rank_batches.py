"""Right: the schedule's length counts batches of all ranks, so it is stepped world_size times."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(epochs=3, batch_size=12):
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    torch.manual_seed(13)
    g = torch.Generator().manual_seed(13)
    x = torch.randn(216, 5, generator=g)
    data = TensorDataset(x, x.abs().sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = CosineAnnealingLR(optimizer, T_max=epochs * len(data) // batch_size)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.smooth_l1_loss(model(x), y).backward()
            optimizer.step()
            for _ in range(world_size):
                scheduler.step()
        if dist.get_rank() == 0:
            print("epoch", epoch, "lr", scheduler.get_last_lr()[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
