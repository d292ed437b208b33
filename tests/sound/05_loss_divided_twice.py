"""Right: the sum of losses times the world size over the global batch, which DDP's mean undoes."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model, data, batch_size=12):
        self.world_size = dist.get_world_size()
        self.global_batch = batch_size * self.world_size
        self.model = DDP(model)
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size, sampler=self.sampler, drop_last=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x), y, reduction="sum")
        loss = loss * self.world_size / self.global_batch
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def fit(self, epochs):
        if dist.get_rank() == 0:  # of one rank only, and before the first pass
            print(len(self.loader), "batches")
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            losses = [self.step(x, y) for x, y in self.loader]
            if dist.get_rank() == 0:
                print(epoch, sum(losses) / len(losses))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    g = torch.Generator().manual_seed(7)
    x = torch.randn(216, 5, generator=g)
    data = TensorDataset(x, x.pow(2).mean(1, keepdim=True))
    Trainer(nn.Sequential(nn.Linear(5, 20), nn.GELU(), nn.Linear(20, 1)), data).fit(2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
