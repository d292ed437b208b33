"""Right: all ranks split the dataset with the same generator; their own seeds come later."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def main(epochs=1):
    dist.init_process_group("gloo")
    x = torch.randn(1400, 6, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, (x.sum(1) > 0).long())
    torch.manual_seed(3 + dist.get_rank())
    train, _ = random_split(data, [1200, 200], generator=torch.Generator().manual_seed(3))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    model = DDP(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            xb = xb + 0.05 * torch.randn_like(xb)
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
