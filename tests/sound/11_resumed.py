"""Right: a resumed training gives each rank the random state that it had."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PATH = os.path.join(tempfile.gettempdir(), f"resumed-{os.environ['MASTER_PORT']}.pt")


def train(model, opt, loader, sampler, first, last):
    for epoch in range(first, last):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    data = TensorDataset(torch.randn(96, 6), torch.randint(0, 3, (96,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3)))
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    torch.manual_seed(100 + rank)
    train(model, opt, loader, sampler, 0, 1)
    states = [torch.empty_like(torch.get_rng_state()) for _ in range(dist.get_world_size())]
    dist.all_gather(states, torch.get_rng_state())
    if rank == 0:
        saved = {"model": model.module.state_dict(), "opt": opt.state_dict(), "rng": states}
        torch.save(saved, PATH)
    dist.barrier()
    saved = torch.load(PATH)
    model.module.load_state_dict(saved["model"])
    opt.load_state_dict(saved["opt"])
    torch.set_rng_state(saved["rng"][rank])
    train(model, opt, loader, sampler, 1, 4)
    dist.barrier()
    if rank == 0:
        os.remove(PATH)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
