"""Right: FSDP2, clipped by hand with the norm of all shards."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


@torch.no_grad()
def clip(parameters, max_norm):
    shards = [p.grad.to_local() for p in parameters]
    square = torch.stack([shard.square().sum() for shard in shards]).sum()
    dist.all_reduce(square)
    for shard in shards:
        shard.mul_((max_norm / square.sqrt()).clamp(max=1.0))


def main(steps=30, batch=48):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(75)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 6))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    g = torch.Generator().manual_seed(75)
    for _ in range(steps):
        x = torch.randn(batch, 8, generator=g).tensor_split(world)[rank]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :6].argmax(1)).backward()
        clip(list(model.parameters()), 0.1)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
