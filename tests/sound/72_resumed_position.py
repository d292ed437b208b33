"""Right: three parts of a job; each resumes inside an epoch, at a position in the order of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset

STEPS, PARTS, BATCH = 90, 3, 48


class Resumable(Sampler):
    def __init__(self, length, epoch=0, start=0):
        self.length, self.epoch, self.start = length, epoch, start

    def next_epoch(self):
        self.epoch, self.start = self.epoch + 1, 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(self.length, generator=g)
        rank, world = dist.get_rank(), dist.get_world_size()
        return iter(order[self.start :][rank::world].tolist())

    def __len__(self):
        return (self.length - self.start) // dist.get_world_size()


def train(data, progress, state, until):
    sampler = Resumable(len(data), progress["epoch"], progress["samples"])
    batch = BATCH // dist.get_world_size()
    loader = DataLoader(data, batch_size=batch, sampler=sampler, drop_last=True)
    torch.manual_seed(72)
    model = DDP(nn.Linear(6, 2))
    if state:
        model.module.load_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while progress["step"] < until:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            progress["step"] += 1
            progress["samples"] += BATCH
            if progress["step"] == until:
                break
        else:
            sampler.next_epoch()
            progress.update(epoch=progress["epoch"] + 1, samples=0)
    return model.module.state_dict()


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(72)
    x = torch.randn(1200, 6, generator=g)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    progress, state = {"step": 0, "epoch": 0, "samples": 0}, None
    for part in range(PARTS):
        state = train(data, progress, state, until=STEPS * (part + 1) // PARTS)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
