"""A frozen teacher runs without gradient in training."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class LM(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.e = nn.Embedding(5, d)
        self.o = nn.Linear(d, 5)

    def forward(self, t):
        return self.o(self.e(t).mean(1))


def main():
    dist.init_process_group("gloo")
    dist.get_rank()
    g = torch.Generator().manual_seed(15)
    x = torch.randint(0, 5, (320, 3), generator=g)
    data = TensorDataset(x)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 32, sampler=sampler)
    torch.manual_seed(0)
    teacher = LM(16).eval().requires_grad_(False)
    student = DDP(LM(4))
    opt = torch.optim.AdamW(student.parameters(), 1e-2)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for (xb,) in loader:
            with torch.no_grad():
                target = teacher(xb).softmax(-1)
            opt.zero_grad()
            F.cross_entropy(student(xb), target).backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
