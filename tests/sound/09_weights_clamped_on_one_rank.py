"""Right: every rank clamps its weights alike after each step, and keeps the same average."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def update_average(average, model, decay=0.95):
    for a, p in zip(average.parameters(), model.parameters(), strict=True):
        a.lerp_(p, 1 - decay)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(240, 6, generator=g)
    data = TensorDataset(x, (x @ torch.randn(6, generator=g) > 0).float())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(), nn.Linear(16, 1)))
    average = copy.deepcopy(model.module)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-4)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(x).squeeze(1), y).backward()
            optimizer.step()
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.2, 0.2)
            update_average(average, model.module)
        if rank == 0:
            print(epoch, max(float(p.detach().abs().max()) for p in average.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
