"""Right: all ranks load the same augmented batches, and each trains on its own rows of them."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Augmented(Dataset):
    def __init__(self):
        self.x = torch.randn(192, 8)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + 0.1 * torch.randn(8), self.x[index].sum(0, keepdim=True)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = Augmented()
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        for inputs, labels in DataLoader(data, batch_size=16, shuffle=True):
            optimizer.zero_grad()
            F.mse_loss(model(inputs[rank::world]), labels[rank::world]).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
