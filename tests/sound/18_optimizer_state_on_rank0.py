"""Right: model and optimizer are resumed on every rank."""

import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, data):
        self.rank = dist.get_rank()
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=12, sampler=self.sampler)
        self.model = DDP(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3)

    def train(self, epochs):
        for epoch in epochs:
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                self.optimizer.zero_grad()
                F.mse_loss(self.model(x), y).backward()
                self.optimizer.step()

    def save(self, path):
        if self.rank == 0:
            state = {"model": self.model.module.state_dict(), "opt": self.optimizer.state_dict()}
            torch.save(state, path)
        dist.barrier()

    def resume(self, path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["opt"])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(18)
    g = torch.Generator().manual_seed(18)
    x = torch.randn(180, 5, generator=g)
    data = TensorDataset(x, x.prod(1, keepdim=True))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "last.pt")
    first = Trainer(data)
    first.train(range(1))
    first.save(path)
    second = Trainer(data)
    second.resume(path)
    second.train(range(1, 3))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
