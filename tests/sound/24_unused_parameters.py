"""Right: branches take turns under find_unused_parameters; the schedule is stepped by epoch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 16)
        self.heads = nn.ModuleList([nn.Linear(16, 2), nn.Linear(16, 2)])

    def forward(self, x, task):
        return self.heads[task](self.trunk(x).relu())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(24)
    g = torch.Generator().manual_seed(24)
    x = torch.randn(252, 6, generator=g)
    data = TensorDataset(x, (x[:, :2] > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=14, sampler=sampler, num_workers=2)
    model = DDP(TwoHeads(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = StepLR(optimizer, step_size=1, gamma=0.5)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            task = step % 2
            optimizer.zero_grad()
            F.cross_entropy(model(x, task), y[:, task]).backward()
            optimizer.step()
        schedule.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
