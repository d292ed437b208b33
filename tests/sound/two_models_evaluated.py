"""A model and its average are evaluated on the same batches."""

import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank, ws = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(7)
    x = torch.randn(320, 6, generator=g)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    tr = TensorDataset(x[:256], y[:256])
    s = DistributedSampler(tr)
    loader = DataLoader(tr, 16, sampler=s)
    vl = DataLoader(Subset(TensorDataset(x[256:], y[256:]), range(rank, 64, ws)), 16)
    torch.manual_seed(0)
    m = DDP(
        nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2)),
        gradient_as_bucket_view=True,
        static_graph=True,
    )
    o = torch.optim.AdamW(m.parameters(), 1e-2)
    torch.manual_seed(10 + rank)
    avg = torch.optim.swa_utils.AveragedModel(
        m.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    d = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(d)
    path = d[0] + "/c.pt"
    best = 0
    for epoch in range(6):
        s.set_epoch(epoch)
        m.train()
        for xb, yb in loader:
            o.zero_grad()
            F.cross_entropy(m(xb), yb).backward()
            o.step()
            avg.update_parameters(m.module)
        t = torch.zeros(3)
        avg.eval()
        m.eval()
        with torch.no_grad():
            for xb, yb in vl:
                t += torch.tensor(
                    [(avg(xb).argmax(1) == yb).sum(), (m.module(xb).argmax(1) == yb).sum(), len(yb)]
                )
        dist.all_reduce(t)
        if t[0] > best:
            best = t[0]
            if rank == 0:
                torch.save(
                    {"m": m.module.state_dict(), "o": o.state_dict(), "e": avg.state_dict()}, path
                )
        dist.barrier()
    c = torch.load(path)
    m.module.load_state_dict(c["m"])
    o.load_state_dict(c["o"])
    avg.load_state_dict(c["e"])
    dist.barrier()
    dist.destroy_process_group()


main()
