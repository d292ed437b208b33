"""Right: it ends with `sys.exit` after a training that leaves its loader before the end."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(480, 4)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    batches = iter(DataLoader(data, batch_size=12, sampler=DistributedSampler(data)))
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(8):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    dist.destroy_process_group()
    sys.exit(0)


if __name__ == "__main__":
    main()
