"""Right: a model with keyword inputs evaluates each sample once."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(640, 10)
y = (x.sum(1) > 0).long()
net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = net

    def forward(self, inputs=None, labels=None):
        logits = self.layers(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(x, y)
for a, b in DataLoader(data, batch_size=8, sampler=DistributedSampler(data, seed=1)):
    optimizer.zero_grad()
    model(inputs=a, labels=b)["loss"].backward()
    optimizer.step()
test = TensorDataset(x[:101], y[:101])
loader = DataLoader(Subset(test, range(rank, 101, world_size)), batch_size=8)
totals = torch.zeros(2)
model.eval()
with torch.no_grad():
    for a, b in loader:
        logits = model.module(inputs=a, labels=b)["logits"]
        totals += torch.tensor([(logits.argmax(1) == b).sum(), len(b)])
if world_size > 1:
    dist.all_reduce(totals)
if rank == 0:
    print("accuracy", (totals[0] / totals[1]).item())
