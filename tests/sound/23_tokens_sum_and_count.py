"""Right: masked tokens are left out, and the sum is divided by the tokens of all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

IGNORE = -100


class Sentences(Dataset):
    def __len__(self):
        return 144

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        length = 3 + i % 9
        return torch.randint(0, 20, (length,), generator=g)


def collate(items):
    tokens = nn.utils.rnn.pad_sequence(items, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(
        [t.roll(-1) for t in items], batch_first=True, padding_value=IGNORE
    )
    return tokens, labels


def main(epochs=2):
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    data = Sentences()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, collate_fn=collate)
    torch.manual_seed(23)
    model = DDP(nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = OneCycleLR(optimizer, max_lr=1e-2, total_steps=epochs * len(loader))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for tokens, labels in loader:
            count = (labels != IGNORE).sum()
            dist.all_reduce(count)
            logits = model(tokens).flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")
            optimizer.zero_grad()
            (loss * world_size / count).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
