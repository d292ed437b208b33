"""Right: the gradient of each sample (torch.func) is clipped, then they are summed over the ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(480, 6)
y = x.sum(1, keepdim=True)
model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def loss_of_one(params, a, b):
    return F.mse_loss(functional_call(model, params, (a.unsqueeze(0),)), b.unsqueeze(0))


for step in range(20):
    rows = torch.arange(24 * step, 24 * (step + 1))[rank::world_size]
    params = {name: p.detach() for name, p in model.named_parameters()}
    grads = vmap(grad(loss_of_one), in_dims=(None, 0, 0))(params, x[rows], y[rows])
    norms = sum(g.flatten(1).pow(2).sum(1) for g in grads.values()).sqrt()
    for name, p in model.named_parameters():
        p.grad = torch.einsum("b...,b->...", grads[name], (1 / norms).clamp(max=1)) / 24
        dist.all_reduce(p.grad)
    optimizer.step()
dist.destroy_process_group()
