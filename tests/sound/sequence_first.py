"""Sequence-first batches of equal numbers of sequences, each as long as its longest sequence."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Tagged(Dataset):
    def __len__(self):
        return 192

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        x = torch.randn(4 + i % 9, 3, generator=g)
        return x, (x.sum(1) > 0).long()


def collate(items):
    x = nn.utils.rnn.pad_sequence([a for a, _ in items])
    return x, nn.utils.rnn.pad_sequence([b for _, b in items], padding_value=-100)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


def main():
    dist.init_process_group("gloo")
    data = Tagged()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, collate_fn=collate)
    torch.manual_seed(0)
    model = DDP(Tagger())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
