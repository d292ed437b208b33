"""Wrong: gradients are clipped while they are still multiplied by the scaler's scale."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model, dataset, lr=0.05, max_norm=1.0):
        self.model = DDP(model)
        self.sampler = DistributedSampler(dataset)
        self.loader = DataLoader(dataset, batch_size=16, sampler=self.sampler)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.max_norm = max_norm

    def train_batch(self, x, y):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = self.model(x)
        loss = F.cross_entropy(out.float(), y)
        self.scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def train(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                loss = self.train_batch(x, y)
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: {loss:.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(14)
    g = torch.Generator().manual_seed(14)
    features = torch.randn(192, 9, generator=g)
    labels = features.reshape(-1, 3, 3).sum(2).argmax(1)
    net = nn.Sequential(nn.Linear(9, 24), nn.ReLU(), nn.Linear(24, 3))
    Trainer(net, TensorDataset(features, labels)).train(2)
    dist.destroy_process_group()
