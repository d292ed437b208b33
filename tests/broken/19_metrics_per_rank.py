"""Wrong: ranks average their own means, though their validation shards differ in size."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def evaluate(model, loader):
    model.eval()
    correct, loss, count = 0.0, 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            out = model.module(x)
            loss += F.cross_entropy(out, y, reduction="sum").item()
            correct += (out.argmax(1) == y).sum().item()
            count += len(y)
    model.train()
    metrics = torch.tensor([loss / count, correct / count])
    dist.all_reduce(metrics)
    return (metrics / dist.get_world_size()).tolist()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(19)
    g = torch.Generator().manual_seed(19)
    x = torch.randn(227, 6, generator=g)
    full = TensorDataset(x, (x[:, :2].sum(1) > 0.3).long())
    train = Subset(full, range(180))
    shard = Subset(full, range(180 + rank, 227, world_size))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=10, sampler=sampler)
    test_loader = DataLoader(shard, batch_size=8)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        loss, accuracy = evaluate(model, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
