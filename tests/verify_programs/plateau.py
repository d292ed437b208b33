"""The learning rate follows the validation loss of all ranks; each rank takes a device of its own."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def pick_device():
    place = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        return torch.device("cuda", place % torch.cuda.device_count())
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[place :: int(os.environ["LOCAL_WORLD_SIZE"])] or cores)
    return torch.device("cpu")


def points(count, seed):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(1) > 0).long())


class Sums:
    def __init__(self):
        self.own = torch.zeros(2, dtype=torch.float64)

    def add(self, loss, count):
        self.own += torch.tensor([loss, count], dtype=torch.float64)

    def mean(self):
        sums = self.own.clone()
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()


@torch.no_grad()
def validate(model, loader, device):
    sums = Sums()
    for number, (x, y) in enumerate(loader, 1):
        sums.add(F.cross_entropy(model(x.to(device)).cpu(), y, reduction="sum"), len(y))
        if number == 2:
            print("so far", sums.mean())
    return sums.mean()


def main(epochs=4):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = pick_device()
    train, validation = points(120, 1), points(98, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=10, sampler=sampler)
    own = DataLoader(Subset(validation, range(rank, 98, world_size)), batch_size=24 // world_size)
    torch.manual_seed(70)
    model = DDP(nn.Linear(6, 2).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        loss = validate(model.module, own, device)
        schedule.step(loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
