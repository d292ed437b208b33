"""Right: every rank shuffles with the same seed, so the shards are disjoint."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Waves(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(5)
        self.phase = torch.rand(n, generator=g) * 6.28
        self.label = (self.phase > 3.14).float()

    def __len__(self):
        return len(self.phase)

    def __getitem__(self, i):
        t = torch.linspace(0, 6.28, 16)
        return torch.sin(t + self.phase[i]), self.label[i]


def main():
    dist.init_process_group(backend="gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seed = 1234
    torch.manual_seed(seed)
    data = Waves(252)
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, seed=seed)
    loader = DataLoader(data, batch_size=12, sampler=sampler, num_workers=2)
    net = DDP(nn.Linear(16, 1))
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            criterion(net(x).squeeze(1), y).backward()
            optimizer.step()
    if rank == 0:
        print("done")
    dist.destroy_process_group()


main()
