"""Right: each rank takes the mean over its own tokens, and its gradient is weighted by their number."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PAD = 0


class Sentences(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        length = 2 + i * i % 13
        return torch.randint(1, 20, (length + 1,), generator=g)


def collate(items):
    tokens = nn.utils.rnn.pad_sequence(items, batch_first=True, padding_value=PAD)
    return tokens[:, :-1], tokens[:, 1:]


def reduce_gradients(model, tokens):
    total = tokens.clone()
    dist.all_reduce(total)
    for p in model.parameters():
        p.grad *= tokens / total
        dist.all_reduce(p.grad)


def main(epochs=2):
    dist.init_process_group("gloo")
    data = Sentences()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, collate_fn=collate)
    torch.manual_seed(69)
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            logits = model(inputs).flatten(0, 1)
            loss = F.cross_entropy(logits, targets.flatten(), ignore_index=PAD)
            optimizer.zero_grad()
            loss.backward()
            reduce_gradients(model, (targets != PAD).sum())
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
