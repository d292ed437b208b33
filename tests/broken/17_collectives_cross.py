"""Wrong: rank 0 alone reduces its loss, which meets what the others reduce next, their counts."""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def report(epoch, loss_sum, count):
    if dist.get_rank() == 0:
        dist.all_reduce(loss_sum)
    dist.all_reduce(count)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: mean loss {(loss_sum / count).item():.4f}")


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    g = torch.Generator().manual_seed(2)
    x = torch.randn(180, 6, generator=g)
    data = TensorDataset(x, x.max(1).values.unsqueeze(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=15, sampler=sampler)
    torch.manual_seed(2)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        loss_sum, count = torch.zeros(1), torch.zeros(1)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(y)
            count += len(y)
        report(epoch, loss_sum, count)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
