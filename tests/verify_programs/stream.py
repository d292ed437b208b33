"""A stream without indices, which deals its samples to ranks and to the workers of each."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, rank, world_size, count=240):
        self.rank, self.world_size, self.count, self.epoch = rank, world_size, count, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch))
        worker = get_worker_info()
        first = self.rank * worker.num_workers + worker.id
        for i in order[first :: self.world_size * worker.num_workers].tolist():
            x = torch.randn(4, generator=torch.Generator().manual_seed(i))
            yield x, x.sum().unsqueeze(0)


def main(epochs=4):
    dist.init_process_group("gloo")
    stream = Stream(dist.get_rank(), dist.get_world_size())
    loader = DataLoader(stream, batch_size=10, num_workers=2)
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(epochs):
        stream.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
