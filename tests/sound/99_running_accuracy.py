"""Right: an evaluation logs its accuracy on the way, from copies of the running sums."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class Accuracy:
    def __init__(self):
        self.sums = torch.zeros(2)  # right, all

    def update(self, predicted, labels):
        self.sums += torch.tensor([(predicted == labels).sum(), len(labels)])

    def compute(self):
        sums = self.sums.clone()
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()


@torch.no_grad()
def validate(model, loader):
    accuracy = Accuracy()
    for number, (inputs, labels) in enumerate(loader, 1):
        accuracy.update(model(inputs).argmax(1), labels)
        if number % 3 == 0:
            running = accuracy.compute()
            if dist.get_rank() == 0:
                print("so far", running)
    return accuracy.compute()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(576, 8)
    y = x[:, :5].argmax(1)
    train, valid = TensorDataset(x[:384], y[:384]), TensorDataset(x[384:], y[384:])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=24 // world, sampler=sampler)
    part = DataLoader(Subset(valid, range(rank, len(valid), world)), batch_size=24 // world)
    model = DDP(nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        accuracy = validate(model.module, part)
        if rank == 0:
            print("accuracy", accuracy)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
