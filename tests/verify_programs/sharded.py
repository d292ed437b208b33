"""FSDP2 shards the blocks and the model; the gradients are clipped by hand with the norm of all shards."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return self.head(x)


@torch.no_grad()
def clip(parameters, max_norm):
    grads = [p.grad for p in parameters]
    shards = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    square = torch.stack([shard.square().sum() for shard in shards]).sum()
    dist.all_reduce(square)
    for shard in shards:
        shard.mul_((max_norm / square.sqrt()).clamp(max=1.0))


@torch.no_grad()
def accuracy(model, loader):
    counts = torch.zeros(2)
    for x, y in loader:
        counts += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main(epochs=3):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(336, 8, generator=torch.Generator().manual_seed(84))
    y = (x.sum(1) > 0).long()
    data, validation = TensorDataset(x[:240], y[:240]), TensorDataset(x[240:], y[240:])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    part = Subset(validation, range(rank, len(validation), world_size))
    torch.manual_seed(84)
    model = Classifier()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            clip(list(model.parameters()), 0.3)
            optimizer.step()
        score = accuracy(model, DataLoader(part, batch_size=8))
        if rank == 0:
            print(epoch, score)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
