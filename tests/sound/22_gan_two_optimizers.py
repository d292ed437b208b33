"""Right: two optimizers, one for each DDP model, and a checkpoint of rank 0 loaded by all."""

import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(22 + rank)
real_data = torch.randn(192, 2, generator=torch.Generator().manual_seed(22)) * 0.3 + 2
dataset = TensorDataset(real_data)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=16, sampler=sampler, drop_last=True)
generator = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)))
critic = DDP(nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))

for epoch in range(2):
    sampler.set_epoch(epoch)
    for (real,) in loader:
        noise = torch.randn(len(real), 4)
        fake = generator(noise)
        opt_d.zero_grad()
        score = critic(torch.cat([real, fake.detach()]))
        truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
        F.binary_cross_entropy_with_logits(score, truth).backward()
        opt_d.step()
        opt_g.zero_grad()
        fooled = critic.module(fake)
        F.binary_cross_entropy_with_logits(fooled, torch.ones(len(real), 1)).backward()
        opt_g.step()

folder = [tempfile.mkdtemp() if rank == 0 else ""]
dist.broadcast_object_list(folder)
path = os.path.join(folder[0], "gan.pt")
if rank == 0:
    torch.save({"g": generator.module.state_dict(), "d": critic.module.state_dict()}, path)
dist.barrier()
saved = torch.load(path)
generator.module.load_state_dict(saved["g"])
critic.module.load_state_dict(saved["d"])
dist.barrier()
if rank == 0:
    shutil.rmtree(folder[0])
dist.destroy_process_group()
