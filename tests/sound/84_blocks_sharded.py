"""Right: FSDP2 shards the blocks, and with the model what is in no block."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


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


def main(epochs=2):
    dist.init_process_group("gloo")
    x = torch.randn(240, 8, generator=torch.Generator().manual_seed(84))
    data = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    torch.manual_seed(84)
    model = Classifier()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
