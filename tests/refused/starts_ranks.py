"""Processes that it starts with multiprocessing make the process group."""

import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, world):
    dist.init_process_group("gloo", "tcp://127.0.0.1:29511", rank=rank, world_size=world)


if __name__ == "__main__":
    context = mp.get_context("fork")
    ranks = [context.Process(target=work, args=(rank, 2)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
