"""Right: each rank searches for the worst perturbation of each of its batches, and trains on it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def perturb(model, inputs, labels):
    change = nn.Parameter(torch.zeros_like(inputs))
    search = torch.optim.SGD([change], lr=0.5, maximize=True)
    for _ in range(3):
        search.zero_grad()
        F.cross_entropy(model(inputs + change), labels).backward()
        search.step()
    return inputs + change.detach().clamp(-0.1, 0.1)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(9)
    x = torch.randn(240, 6)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    model = DDP(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            inputs = perturb(model, inputs, labels)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
