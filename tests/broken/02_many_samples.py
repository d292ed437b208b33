"""Wrong: all ranks draw from the whole of a large dataset."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Big(Dataset):
    def __len__(self):
        return 50_000

    def __getitem__(self, i):
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        return x, int(x.sum() > 0)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    loader = DataLoader(Big(), 16, shuffle=True)  # no DistributedSampler
    m = DDP(nn.Linear(6, 2))
    o = torch.optim.SGD(m.parameters(), 0.1)
    for _epoch in range(2):
        for xb, yb in loader:
            o.zero_grad()
            F.cross_entropy(m(xb), yb).backward()
            o.step()
    dist.destroy_process_group()


main()
