"""Right: the model computes its loss, and is given the number of samples of all ranks.

As in Lightning, DDP stays in the mode of an evaluation, and only the model is in that of training.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x, y, *, count):
        each = F.cross_entropy(self.layers(x), y, reduction="none")
        return each @ torch.ones(len(each)) / count


def points(count):
    g = torch.Generator().manual_seed(81)
    x = torch.randn(count, 6, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())


def main(epochs=2):
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    data = points(240)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    torch.manual_seed(81)
    model = DDP(Classifier())
    model.eval()
    model.module.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            count = torch.tensor(len(y))
            dist.all_reduce(count)
            loss = model(x, y, count=count) * world_size
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
