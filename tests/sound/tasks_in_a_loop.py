"""Right: two tasks with heads of their own, and parts of one batch, have the weight 0.5 each in one loop."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])

    def forward(self, x, task):
        return self.heads[task](torch.relu(self.trunk(x)))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(10)
    x = torch.randn(240, 6)
    data = TensorDataset(x, (x[:, 0] > 0).long(), (x[:, 1] > 0).long())
    model = DDP(Heads(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, first, second in loader:
            optimizer.zero_grad()
            parts = (inputs[:8], first[:8]), (inputs[8:], second[8:])
            for task, (part, labels) in enumerate(parts):
                model.require_backward_grad_sync = task == 1
                (0.5 * F.cross_entropy(model(part, task), labels)).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
