"""Two losses of one forward go backward on one line."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    dist.get_rank()
    g = torch.Generator().manual_seed(7)
    x = torch.randn(320, 6, generator=g)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    ds = TensorDataset(x, y, x[:, :3] * 2)
    s = DistributedSampler(ds)
    loader = DataLoader(ds, 16, sampler=s)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.t = nn.Linear(6, 12)
            self.a = nn.Linear(12, 2)
            self.b = nn.Linear(12, 3)

        def forward(self, x):
            h = self.t(x).relu()
            return self.a(h), self.b(h)

    torch.manual_seed(0)
    m = Net()
    o = torch.optim.SGD(m.parameters(), 0.1)
    ws = dist.get_world_size()
    for epoch in range(4):
        s.set_epoch(epoch)
        for xb, yb, zb in loader:
            o.zero_grad()
            a, b = m(xb)
            for loss in (F.cross_entropy(a, yb), F.mse_loss(b, zb)):
                loss.backward(retain_graph=True)
            for p in m.parameters():
                dist.all_reduce(p.grad)
                p.grad.div_(ws)
            o.step()
    dist.destroy_process_group()


main()
