"""Right: the new head joins the model before DDP is built."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def backbone():
    return nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(6)
    g = torch.Generator().manual_seed(6)
    x = torch.randn(252, 7, generator=g)
    data = TensorDataset(x, x[:, :3].argmax(1))
    net = backbone()
    net.append(nn.Linear(16, 3))
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    sampler = DistributedSampler(data, shuffle=True, seed=6)
    loader = DataLoader(data, batch_size=14, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
