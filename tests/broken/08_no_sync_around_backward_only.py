"""Wrong: the forward is outside no_sync, so every micro-batch synchronises all the same."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def run_epoch(ddp, loader, optimizer, accumulate):
    for i, (x, y) in enumerate(loader):
        if (i + 1) % accumulate:
            loss = F.nll_loss(ddp(x), y) / accumulate
            with ddp.no_sync():
                loss.backward()
        else:
            loss = F.nll_loss(ddp(x), y) / accumulate
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(4)
    x = torch.randn(216, 12, generator=g)
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=6, sampler=sampler, drop_last=True)
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2), nn.LogSoftmax(dim=1))
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        run_epoch(ddp, loader, optimizer, accumulate=3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
