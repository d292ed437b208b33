"""Predictions of a padded validation set are gathered; their order is restored, and the surplus cut off."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def gather(values, size):
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)
    return torch.stack(parts, dim=1).flatten()[:size]  # sample i is on rank i % world_size


@torch.no_grad()
def accuracy(model, loader, size):
    model.eval()  # DDP broadcasts the statistics of BatchNorm in its forward
    found, wanted = [], []
    for x, y in loader:
        found.append(model(x).argmax(1))
        wanted.append(y)
    model.train()
    predictions = gather(torch.cat(found), size)
    labels = gather(torch.cat(wanted), size)
    return (predictions == labels).float().mean().item()


def main(epochs=3):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x = torch.randn(361, 5, generator=torch.Generator().manual_seed(65))
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    train, validation = TensorDataset(x[:240], y[:240]), TensorDataset(x[240:], y[240:])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=10, sampler=sampler)
    padded = DistributedSampler(validation, shuffle=False)
    validation_loader = DataLoader(validation, batch_size=16, sampler=padded)
    torch.manual_seed(65)
    net = nn.Sequential(nn.Linear(5, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        score = accuracy(model, validation_loader, len(validation))
        if rank == 0:
            print(f"epoch {epoch}: accuracy {score:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
