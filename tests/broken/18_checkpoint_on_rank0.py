"""Wrong: rank 0 alone loads the checkpoint, after DDP made the replicas equal."""

import pathlib
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))


def pretrained(rank):
    """Write a checkpoint on rank 0 and give its path to all."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    path = pathlib.Path(folder[0]) / "model.pt"
    if rank == 0:
        torch.manual_seed(99)
        torch.save(build().state_dict(), path)
    dist.barrier()
    return path


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    path = pretrained(rank)
    torch.manual_seed(0)
    model = DDP(build())
    if rank == 0:
        model.module.load_state_dict(torch.load(path, map_location="cpu"))
    g = torch.Generator().manual_seed(18)
    x = torch.randn(192, 6, generator=g)
    data = TensorDataset(x, x.square().sum(1, keepdim=True) / 6)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(path.parent)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
