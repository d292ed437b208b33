"""Right: the temperature is no part of the model, so the script averages its gradient itself."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def average(gradient):
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(8)
    x = torch.randn(240, 6)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    model = DDP(nn.Linear(6, 2))
    temperature = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs) * temperature, labels).backward()
            average(temperature.grad)
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
