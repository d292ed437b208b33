"""Right: micro-batches of 149 and 150 tokens; each token has the same weight in the step."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ACCUMULATE = 2


class Lines(Dataset):
    def __len__(self):
        return 240

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return torch.randint(0, 20, (30 - (i % 7 == 0),), generator=g)


def main():
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    data = Lines()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=5, sampler=sampler, collate_fn=torch.cat)
    torch.manual_seed(5)
    model = DDP(nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = iter(loader)
        for _ in range(len(loader) // ACCUMULATE):
            step = [next(batches) for _ in range(ACCUMULATE)]
            tokens = torch.tensor(float(sum(len(x) for x in step)))
            dist.all_reduce(tokens)
            optimizer.zero_grad()
            for i, x in enumerate(step):
                last = i == ACCUMULATE - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = F.cross_entropy(model(x), x.roll(-1), reduction="sum")
                    (loss * world_size / tokens).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
