"""Right: two noisy views of each sample; all views of all ranks are compared, in the order of the labels."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def contrast(views, temperature=0.2):
    count = len(views)
    similar = (views @ views.T / temperature).fill_diagonal_(float("-inf"))
    return F.cross_entropy(similar, (torch.arange(count) + count // 2) % count)


def of_all_ranks(first, second):
    return torch.cat([*all_gather(first), *all_gather(second)])


def main(epochs=6, batch=48):
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(74)
    data = TensorDataset(torch.randn(384, 8, generator=g))
    sampler = DistributedSampler(data)
    size = batch // dist.get_world_size()
    loader = DataLoader(data, batch_size=size, sampler=sampler, drop_last=True)
    torch.manual_seed(74)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    noise = torch.Generator().manual_seed(100 + dist.get_rank())
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            views = x.repeat(2, 1)
            views = views + 0.1 * torch.randn(views.shape, generator=noise)
            first, second = F.normalize(model(views), dim=1).chunk(2)
            optimizer.zero_grad()
            contrast(of_all_ranks(first, second)).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
