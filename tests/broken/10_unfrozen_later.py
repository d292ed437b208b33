"""Wrong: a layer is unfrozen after DDP was built, which does not reduce it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(7)
    x = torch.randn(320, 6, generator=g)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    ds = TensorDataset(x, y)
    s = DistributedSampler(ds)
    loader = DataLoader(ds, 16, sampler=s)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    net[0].requires_grad_(False)
    model = DDP(net)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for epoch in range(4):
        s.set_epoch(epoch)
        if epoch == 1:
            net[0].requires_grad_(True)
        for xb, yb in loader:
            opt.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            opt.step()
    dist.destroy_process_group()


main()
