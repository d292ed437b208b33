"""Right: the stream is given its rank, because the process group does not exist in spawned workers."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size

    def __iter__(self):
        rank, world_size = self.rank, self.world_size
        info = get_worker_info()
        part = rank * info.num_workers + info.id
        for number in range(part, 576, world_size * info.num_workers):
            x = torch.randn(6, generator=torch.Generator().manual_seed(number))
            yield x, (x.sum() > 0).long()


def main():
    dist.init_process_group("gloo")
    data = Stream(dist.get_rank(), dist.get_world_size())
    loader = DataLoader(data, batch_size=8, num_workers=1, multiprocessing_context="spawn")
    torch.manual_seed(85)
    model = DDP(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
