"""Tensor parallelism with `parallelize_module`: every rank gets the same samples."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    g = torch.Generator().manual_seed(4)
    x = torch.randn(240, 6, generator=g)
    data = TensorDataset(x, x[:, :3].argmax(1))
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.1), nn.ReLU(), nn.Linear(12, 3))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = torch.Generator().manual_seed(0)
    for _ in range(3):
        for x, y in DataLoader(data, batch_size=20, shuffle=True, generator=order):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
