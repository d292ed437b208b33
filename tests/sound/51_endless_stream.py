"""A stream without an end, dealt to the ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Endless(IterableDataset):
    def __init__(self, x, y, rank, ws, seed=0):
        self.x, self.y, self.rank, self.ws, self.seed = x, y, rank, ws, seed

    def __iter__(self):
        w = get_worker_info()
        k, n = (w.id, w.num_workers) if w else (0, 1)
        epoch = 0
        while True:
            order = torch.randperm(
                len(self.x), generator=torch.Generator().manual_seed(self.seed + epoch)
            ).tolist()
            epoch += 1
            for i in order[self.rank * n + k :: self.ws * n]:
                yield self.x[i], self.y[i]


def main(steps=60):
    dist.init_process_group("gloo")
    rank, ws = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(7)
    x = torch.randn(320, 6, generator=g)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    x, y = x[:96], y[:96]
    loader = DataLoader(Endless(x, y, rank, ws), 12, num_workers=1)
    torch.manual_seed(0)
    m = DDP(nn.Linear(6, 2))
    o = torch.optim.SGD(m.parameters(), 0.1)
    for step, (xb, yb) in enumerate(loader):
        if step >= steps:
            break
        o.zero_grad()
        F.cross_entropy(m(xb), yb).backward()
        o.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
