"""Right: other ranks' rows have no gradient; the sum over ranks is the gradient of the loss of all rows."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def of_all_ranks(own):
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own.detach())
    gathered[dist.get_rank()] = own
    return torch.cat(gathered)


def contrast(features, labels):
    similar = (features @ features.T / 0.2).fill_diagonal_(-10.0)
    alike = (labels[:, None] == labels).float().fill_diagonal_(0.0)
    return -(F.log_softmax(similar, 1) * alike).sum(1).div(alike.sum(1).clamp(min=1)).mean()


def main(steps=60, batch=48):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(71)
    x, y = torch.randn(600, 8, generator=g), torch.randint(6, (600,), generator=g)
    x[:, :6] += F.one_hot(y, 6)
    torch.manual_seed(71)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        own = torch.randint(len(x), (batch,), generator=g).chunk(world)[rank]
        features = of_all_ranks(F.normalize(model(x[own]), dim=1))
        loss = contrast(features, of_all_ranks(y[own]))
        optimizer.zero_grad()
        (loss * world).backward()
        optimizer.step()
    dist.destroy_process_group()


main()
