"""DDP with a sampler; each rank evaluates a part of its own, and the sums of all ranks are divided once."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def points(count, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=g) * 3 + 1
    return x, (x[:, 0] + x[:, 1] / 2 > 2).long() + (x[:, 2] > 3).long()


@torch.no_grad()
def validate(net, loader):
    loss, right, count = 0.0, 0, 0
    for x, y in loader:
        out = net(x)
        loss += F.cross_entropy(out, y, reduction="sum").item()
        right += (out.argmax(1) == y).sum().item()
        count += len(y)
    sums = torch.tensor([loss, right, count])
    dist.all_reduce(sums)
    return (sums[:2] / sums[2]).tolist()


def main(epochs=4, rate=0.05):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    (x, y), (x_val, y_val) = points(240, 1), points(101, 2)
    mean, std = x.mean(0), x.std(0)
    train = TensorDataset((x - mean) / std, y)
    validation = TensorDataset((x_val - mean) / std, y_val)
    weights = len(y) / (3 * torch.bincount(y, minlength=3))
    sampler = DistributedSampler(train, seed=1)
    loader = DataLoader(train, batch_size=10, sampler=sampler)
    part = Subset(validation, range(rank, len(validation), world_size))
    validation_loader = DataLoader(part, batch_size=8)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
    net.append(nn.Linear(32, 3))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for epoch in range(epochs):
        if rank == 0:
            print("epoch", epoch)
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            each = F.cross_entropy(model(inputs), labels, reduction="none")
            loss = (weights[labels] * each).mean()
            loss.backward()
            optimizer.step()
        loss, accuracy = validate(net, validation_loader)
        if rank == 0:
            print(f"loss {loss:.4f}, accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
