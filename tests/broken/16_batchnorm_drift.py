"""Wrong: BatchNorm statistics are never made equal, and each rank evaluates with its own."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def split(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(n, 8, generator=g) + 1
    return TensorDataset(x, (x[:, 0] > 1).long())


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(16)
    train, test = split(240, 0), split(77, 1)
    test_loader = DataLoader(Subset(test, range(rank, len(test), world_size)), batch_size=16)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=10, sampler=sampler)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    model = DDP(net, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        net.train()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        net.eval()
        totals = torch.zeros(2)
        with torch.no_grad():
            for x, y in test_loader:
                totals += torch.tensor([(net(x).argmax(1) == y).sum(), len(y)])
        dist.all_reduce(totals)
        if rank == 0:
            print(epoch, (totals[0] / totals[1]).item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
