"""Right: every rank evaluates the whole set and needs no collective; weights re-made alike."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def accuracy(net, dataset):
    net.eval()
    hits = sum((net(x).argmax(1) == y).sum().item() for x, y in DataLoader(dataset, 25))
    net.train()
    return hits / len(dataset)


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(26)
    x = torch.randn(319, 8, generator=g)
    y = x[:, :3].argmax(1)
    train, test = TensorDataset(x[:240], y[:240]), TensorDataset(x[240:], y[240:])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=20, sampler=sampler)
    torch.manual_seed(26)
    net = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 3))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    best = 0.0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if epoch == 0:  # the head starts anew, from one seed on all ranks
            torch.manual_seed(260)
            net[2].reset_parameters()
        best = max(best, accuracy(net, test))
    if dist.get_rank() == 0:
        print(f"best {best:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
