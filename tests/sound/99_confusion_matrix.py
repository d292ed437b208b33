"""Right: the ranks sum a confusion matrix, and each sets it to 0 after the evaluation."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES = 5


class Confusion:
    def __init__(self):
        self.counts = torch.zeros(CLASSES, CLASSES)

    def update(self, predicted, labels):
        pairs = labels * CLASSES + predicted
        self.counts += torch.bincount(pairs, minlength=CLASSES**2).view(CLASSES, CLASSES)


def report(confusion):
    if dist.get_rank() == 0:
        print("accuracy", (confusion.counts.diag().sum() / confusion.counts.sum()).item())
    confusion.counts.zero_()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(432, 8)
    y = x[:, :CLASSES].argmax(1)
    data = TensorDataset(x[:384], y[:384])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=24 // dist.get_world_size(), sampler=sampler)
    model = DDP(nn.Linear(8, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    confusion = Confusion()
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        part = slice(384 + dist.get_rank(), None, dist.get_world_size())
        with torch.no_grad():
            confusion.update(model.module(x[part]).argmax(1), y[part])
        dist.all_reduce(confusion.counts)
        steps = torch.tensor(float(len(loader) * (epoch + 1)))
        dist.all_reduce(steps)
        report(confusion)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
