"""Right: each rank clips the gradient of each sample, and all add the same noise to the sum (DP-SGD)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MAX_NORM, SIGMA = 0.5, 0.1


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(128, 8)
    data = TensorDataset(x, (x @ torch.randn(8, 4)).argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
    model = nn.Linear(8, 4)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    noise = torch.Generator().manual_seed(7)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            sums = [torch.zeros_like(p) for p in parameters]
            for i in range(len(inputs)):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1]).backward()
                nn.utils.clip_grad_norm_(parameters, MAX_NORM)
                for own, p in zip(sums, parameters, strict=True):
                    own += p.grad
            for own, p in zip(sums, parameters, strict=True):
                dist.all_reduce(own)
                own += SIGMA * MAX_NORM * torch.randn(own.shape, generator=noise)
                p.grad = own / (len(inputs) * dist.get_world_size())
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
