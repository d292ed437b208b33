"""Wrong: the second optimizer's gradients are clipped while they are still scaled."""

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
    A, B = DDP(nn.Linear(6, 2)), DDP(nn.Linear(6, 2))
    oa, ob = torch.optim.SGD(A.parameters(), 0.1), torch.optim.SGD(B.parameters(), 0.1)
    sc = torch.amp.GradScaler("cpu", init_scale=4096.0)
    for epoch in range(3):
        s.set_epoch(epoch)
        for xb, yb in loader:
            oa.zero_grad()
            sc.scale(F.cross_entropy(A(xb), yb)).backward()
            sc.unscale_(oa)
            nn.utils.clip_grad_norm_(A.parameters(), 1.0)
            sc.step(oa)
            ob.zero_grad()
            sc.scale(F.cross_entropy(B(xb), yb)).backward()
            nn.utils.clip_grad_norm_(B.parameters(), 1.0)
            sc.step(ob)  # not unscaled
            sc.update()
    dist.destroy_process_group()


main()
