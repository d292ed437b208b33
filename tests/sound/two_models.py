"""Right: a GAN whose batches are drawn alike on all ranks, each of which keeps its rows."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def rows(tensor):
    return tensor.tensor_split(dist.get_world_size())[dist.get_rank()]


def net(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs))


def main(steps=60, batch=96):
    dist.init_process_group("gloo")
    data = torch.randn(6000, 2, generator=torch.Generator().manual_seed(72))
    draws = torch.Generator().manual_seed(73)
    torch.manual_seed(72)
    maker, judge = DDP(net(4, 2)), DDP(net(2, 1))
    makes = torch.optim.Adam(maker.parameters(), lr=2e-3, betas=(0.5, 0.99))
    judges = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.99))
    for _ in range(steps):
        real = rows(data[torch.randint(len(data), (batch,), generator=draws)])
        noise = rows(torch.randn(2, batch, 4, generator=draws).movedim(1, 0))
        with torch.no_grad():
            fake = maker.module(noise[:, 0])
        right, wrong = judge(torch.cat([real, fake])).chunk(2)
        judges.zero_grad()
        (F.softplus(-right).mean() + F.softplus(wrong).mean()).backward()
        judges.step()
        makes.zero_grad()
        F.softplus(-judge.module(maker(noise[:, 1]))).mean().backward()
        makes.step()
    dist.destroy_process_group()


main()
