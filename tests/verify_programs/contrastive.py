"""Each rank compares its samples with those of all ranks, with a temperature that DDP does not know."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def contrast(first, second, scale):
    everyone = torch.cat(all_gather(second))
    wanted = torch.arange(len(first)) + dist.get_rank() * len(first)
    return F.cross_entropy(first @ everyone.T * scale, wanted)


def average(gradient):
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()


def main(epochs=4, batch=48):
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(71)
    x = torch.randn(384, 8, generator=g)
    views = TensorDataset(x, x + 0.1 * torch.randn(384, 8, generator=g))
    sampler = DistributedSampler(views)
    size = batch // dist.get_world_size()
    loader = DataLoader(views, batch_size=size, sampler=sampler, drop_last=True)
    torch.manual_seed(71)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)))
    scale = nn.Parameter(torch.tensor(5.0))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for one, two in loader:
            first, second = F.normalize(model(torch.cat([one, two])), dim=1).chunk(2)
            optimizer.zero_grad()
            contrast(first, second, scale).backward()
            average(scale.grad)
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
