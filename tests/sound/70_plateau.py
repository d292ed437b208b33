"""Right: the learning rate follows the validation loss of all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def points(count, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())


@torch.no_grad()
def validate(model, loader):
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    for x, y in loader:
        sums[0] += F.cross_entropy(model(x), y, reduction="sum").double()
        sums[1] += len(y)
    model.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main(epochs=4):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train, validation = points(120, 1), points(50, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=10, sampler=sampler)
    own = Subset(validation, range(rank, len(validation), world_size))
    validation_loader = DataLoader(own, batch_size=8)
    torch.manual_seed(70)
    model = DDP(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        loss = validate(model.module, validation_loader)
        schedule.step(loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
