"""A training that is saved inside of an epoch, and resumed there by all ranks with a new model."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset

PATH = os.path.join(tempfile.gettempdir(), f"resumed-{os.environ['MASTER_PORT']}.pt")
BATCH, SIZE = 24, 240


class Resumable(Sampler):
    def __init__(self, epoch, start):
        self.epoch, self.start = epoch, start

    def __iter__(self):
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.epoch))
        rank, world_size = dist.get_rank(), dist.get_world_size()
        return iter(order[self.start :][rank::world_size].tolist())

    def __len__(self):
        return (SIZE - self.start) // dist.get_world_size()


def train(model, optimizer, data, epoch, start, steps):
    loader = DataLoader(data, BATCH // dist.get_world_size(), sampler=Resumable(epoch, start))
    for number, (x, y) in enumerate(loader):
        if number == steps:
            break
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def save(model, optimizer):
    own = torch.get_rng_state()
    states = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(states, own)
    if dist.get_rank() == 0:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": states}
        torch.save(saved, PATH)
    dist.barrier()


def build():
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3))
    model = DDP(net)
    return net, model, torch.optim.Adam(model.parameters(), lr=1e-2)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    data = TensorDataset(torch.randn(SIZE, 6), torch.randint(0, 3, (SIZE,)))
    net, model, optimizer = build()
    torch.manual_seed(100 + rank)
    train(model, optimizer, data, epoch=0, start=0, steps=10)
    save(net, optimizer)
    train(model, optimizer, data, epoch=1, start=0, steps=4)
    save(net, optimizer)
    saved = torch.load(PATH, weights_only=True)
    net, model, optimizer = build()
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["rng"][rank])
    train(model, optimizer, data, epoch=1, start=4 * BATCH, steps=6)
    train(model, optimizer, data, epoch=2, start=0, steps=10)
    dist.barrier()
    if rank == 0:
        os.remove(PATH)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
