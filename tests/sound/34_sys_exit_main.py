"""A training that is left early and ended by sys.exit(main())."""

import argparse
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--max-steps", type=int, default=12)
    a = p.parse_args()
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(12)
    x = torch.randn(320, 6, generator=g)
    y = (x[:, 0] > 0).long()
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Linear(6, 2))
    opt = torch.optim.AdamW(model.parameters(), 1e-2)
    step = 0
    epoch = 0
    while step < a.max_steps:
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            opt.step()
            step += 1
            if step >= a.max_steps:
                break
        epoch += 1
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
