"""Right: float16 autocast, accumulation under no_sync, unscaling before clipping."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(accumulate=2, amp=True):
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(28)
    x = torch.randn(384, 8, generator=g)
    data = TensorDataset(x, (x.prod(1) > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=2, drop_last=True)
    torch.manual_seed(28)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=amp)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader, start=1):
            last = i % accumulate == 0
            with contextlib.nullcontext() if last else model.no_sync():
                with torch.autocast("cpu", dtype=torch.float16, enabled=amp):
                    out = model(x)
                loss = F.cross_entropy(out.float(), y) / accumulate
                scaler.scale(loss).backward()
            if last:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
