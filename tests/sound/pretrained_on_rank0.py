"""Right: rank 0 alone pretrains a part and saves it; all ranks load it before DDP is built."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def pretrain(path, data):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in zip(data.tensors[0].split(64), data.tensors[1].split(64), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    torch.save(model[0].state_dict(), path)


def main(epochs=3):
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(78)
    x = torch.randn(256, 6, generator=g)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "first.pt")
    if dist.get_rank() == 0:
        pretrain(path, data)
    dist.barrier()
    torch.manual_seed(78)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    model[0].load_state_dict(torch.load(path))
    model = DDP(model)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
