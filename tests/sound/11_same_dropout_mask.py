"""Right: every rank has a seed of its own, so dropout masks differ; DDP makes weights equal."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=17)
parser.add_argument("--epochs", type=int, default=2)


def main(args):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed + rank)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(240, 10, generator=g)
    dataset = TensorDataset(x, (x.norm(dim=1) > 3).long())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=10, sampler=sampler)
    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 2))
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if rank == 0:  # the whole set, without a collective
            net.eval()
            with torch.no_grad():
                xs, ys = dataset.tensors
                print(epoch, (net(xs).argmax(1) == ys).float().mean().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parser.parse_args())
