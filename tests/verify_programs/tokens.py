"""Accumulated gradients under no_sync; each token counts once in a step, and the rate decays to 0."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

IGNORE, ACCUMULATE = -100, 2


class Sentences(Dataset):
    def __len__(self):
        return 192

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return torch.randint(0, 20, (3 + i * i % 11,), generator=g)


def collate(items):
    tokens = nn.utils.rnn.pad_sequence(items, batch_first=True)
    labels = [t.roll(-1) for t in items]
    return tokens, nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORE)


def main(epochs=6):
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    data = Sentences()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16 // world_size, sampler=sampler, collate_fn=collate, drop_last=True)
    torch.manual_seed(23)
    model = DDP(nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = epochs * (len(loader) // ACCUMULATE)
    schedule = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        batches = iter(loader)
        for _ in range(len(loader) // ACCUMULATE):
            step = [next(batches) for _ in range(ACCUMULATE)]
            count = sum((labels != IGNORE).sum() for _, labels in step)
            dist.all_reduce(count)
            optimizer.zero_grad()
            for i, (tokens, labels) in enumerate(step):
                syncs = i == ACCUMULATE - 1
                with contextlib.nullcontext() if syncs else model.no_sync():
                    logits, labels = model(tokens).flatten(0, 1), labels.flatten()
                    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
                    (loss * world_size / count).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            schedule.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
