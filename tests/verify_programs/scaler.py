"""A GradScaler, gradients that are unscaled and clipped, and a one-cycle schedule of a rank's own steps."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(epochs=2):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(240, 6, generator=torch.Generator().manual_seed(15))
    y = 5 * x.pow(3).sum(1, keepdim=True)
    y[::40] = 300.0  # some labels are broken
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    torch.manual_seed(15)
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = OneCycleLR(optimizer, 0.05, total_steps=epochs * len(loader))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, wanted in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), wanted)
            scaler.scale(loss).backward()
            level = loss.detach().clone()
            dist.all_reduce(level)
            schedule.step()
            if level / world_size > 8000.0:
                continue
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        if rank == 0:
            print(epoch, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
