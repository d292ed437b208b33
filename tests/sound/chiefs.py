"""Right: each of two models is updated by one rank, its chief, which sends the weights to the others."""

import torch
import torch.distributed as dist
from torch import nn


class Updater:
    def __init__(self, model, chief):
        self.parameters = list(model.parameters())
        self.chief = chief
        mine = dist.get_rank() == chief
        self.optimizer = torch.optim.Adam(self.parameters, lr=1e-2) if mine else None
        self.publish()

    def publish(self):
        for parameter in self.parameters:
            dist.broadcast(parameter.data, src=self.chief)

    def update(self, loss):
        for parameter, own in zip(
            self.parameters, torch.autograd.grad(loss, self.parameters), strict=True
        ):
            dist.reduce(own, dst=self.chief)
            parameter.grad = own / dist.get_world_size()
        if self.optimizer:
            self.optimizer.step()
        self.publish()


def main(steps=30, batch=24):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(76)
    maker, critic = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    of_maker, of_critic = Updater(maker, world - 1), Updater(critic, 0)
    g = torch.Generator().manual_seed(76)

    def rows(width):
        return torch.randn(batch, width, generator=g)[rank::world]

    for _ in range(steps):
        for _ in range(2):
            fake = maker(rows(4)).detach()
            of_critic.update(critic(fake).mean() - critic(rows(6) + 1).mean())
        of_maker.update(-critic(maker(rows(4))).mean())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
