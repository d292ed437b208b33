"""Each rank plays its own games without gradient, then learns of them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


# policy gradient on a small grid: each rank plays its own games
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, s):
        return torch.distributions.Categorical(logits=self.f(s))


def play(net, n=8, length=6):
    s = torch.zeros(n, 2)
    S, A, R = [], [], torch.zeros(n)
    with torch.no_grad():
        for _t in range(length):
            a = net(s).sample()
            S.append(s.clone())
            A.append(a)
            s[torch.arange(n), a] += 1
            R += (a == 0).float()
    return torch.cat(S), torch.cat(A), R.repeat(length)


def main(iterations=25):
    dist.init_process_group("gloo")
    rank, ws = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DDP(Policy())
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    torch.manual_seed(1 + rank)
    model = model
    for it in range(iterations):
        S, A, R = play(model.module)
        logp = model.module(S).log_prob(A)
        loss = -(logp * (R - R.mean())).mean()
        opt.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= ws
        opt.step()
        r = R.mean().clone()
        dist.all_reduce(r)
        if rank == 0:
            print(it, (r / ws).item())
    dist.destroy_process_group()


main()
