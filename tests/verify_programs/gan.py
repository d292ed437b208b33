"""Two models with an optimizer each; every rank draws noise of its own."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NOISE = 4


def judge(critic, samples, wanted):
    scores = critic(samples)
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, wanted))


def main(epochs=2, seed=11):
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    data = TensorDataset(torch.randn(240, 8) * 0.5 + 1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    maker = nn.Sequential(nn.Linear(NOISE, 16), nn.ReLU(), nn.Linear(16, 8))
    maker = DDP(maker)
    critic = DDP(nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
    maker_step = torch.optim.SGD(maker.parameters(), lr=0.05)
    critic_step = torch.optim.SGD(critic.parameters(), lr=0.05)
    torch.manual_seed(seed + dist.get_rank())
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            made = maker(torch.randn(len(real), NOISE))
            critic_step.zero_grad()
            both = torch.cat([real, made.detach()])
            wanted = torch.cat([torch.ones(len(real), 1), torch.zeros(len(made), 1)])
            F.binary_cross_entropy_with_logits(critic(both), wanted).backward()
            critic_step.step()
            maker_step.zero_grad()
            judge(critic, made, 1.0).backward()
            maker_step.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
