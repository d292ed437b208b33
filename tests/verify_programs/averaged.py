"""The mean of the weights (EMA) and the statistics of BatchNorm are equal on all ranks when they evaluate."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def average_buffers(model):
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()


@torch.no_grad()
def accuracy(model, x, y, rank, world_size):
    right = model(x[rank::world_size]).argmax(1) == y[rank::world_size]
    counts = torch.tensor([right.sum(), len(right)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main(epochs=3):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = 3 * torch.randn(336, 8, generator=torch.Generator().manual_seed(16)) + 1
    y = (x[:, 0] > 1).long()
    sampler = DistributedSampler(TensorDataset(x[:240], y[:240]))
    loader = DataLoader(TensorDataset(x[:240], y[:240]), batch_size=10, sampler=sampler)
    torch.manual_seed(16)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    model = DDP(net, broadcast_buffers=False)
    mean = copy.deepcopy(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        net.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            with torch.no_grad():
                for p in net.parameters():
                    p.clamp_(-0.2, 0.2)
                for old, new in zip(mean.parameters(), net.parameters(), strict=True):
                    old.lerp_(new, 0.1)
        average_buffers(net)
        net.eval()
        mean.load_state_dict(dict(net.named_buffers()), strict=False)
        mean.eval()
        scores = [accuracy(each, x[240:], y[240:], rank, world_size) for each in (net, mean)]
        if rank == 0:
            print(epoch, scores)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
