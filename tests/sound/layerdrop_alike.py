"""LayerDrop drawn from Python's `random`, alike on all ranks; the dropout masks differ."""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.dropout = nn.Dropout(0.1)
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        for layer in self.layers:
            if not self.training or random.random() > 0.3:
                x = x + self.dropout(torch.relu(layer(x)))
        return self.out(x)


def main():
    dist.init_process_group("gloo")
    random.seed(9)  # the same layers on all ranks, else DDP would wait for gradients
    torch.manual_seed(9 + dist.get_rank())
    g = torch.Generator().manual_seed(1)
    x = torch.randn(240, 6, generator=g)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    model = DDP(Net(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
