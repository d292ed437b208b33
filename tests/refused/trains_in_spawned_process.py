"""It trains in processes that it starts with the spawn method."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def work(rank, world):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(4, 2)).mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    context = mp.get_context("spawn")
    process = context.Process(target=work, args=(0, 1))
    process.start()
    process.join()
