"""Right: contrastive pairs; each rank compares its own samples with those of all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def contrast(first, second, temperature=0.2):
    everyone = torch.cat(all_gather(second))
    logits = first @ everyone.T / temperature
    wanted = torch.arange(len(first)) + dist.get_rank() * len(first)
    return F.cross_entropy(logits, wanted)


def main(epochs=3, batch=48):
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(71)
    x = torch.randn(384, 8, generator=g)
    views = TensorDataset(x, x + 0.1 * torch.randn(384, 8, generator=g))
    sampler = DistributedSampler(views)
    loader = DataLoader(views, batch_size=24, sampler=sampler, drop_last=True)
    torch.manual_seed(71)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for one, two in loader:
            both = F.normalize(model(torch.cat([one, two])), dim=1)
            first, second = both.chunk(2)
            loss = contrast(first, second)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
