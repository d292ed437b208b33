"""A script for torchrun that uses plain DistributedDataParallel and does not import Paceline.

    torchrun --nproc-per-node 2 examples/plain_torchrun.py
    paceline run --nproc-per-node 2 examples/plain_torchrun.py

`paceline run` runs it unchanged. It shows the first original error, prefixes log lines with the rank,
restarts failed jobs, and leaves no process behind.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import make_datasets, make_model
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 5


def main() -> None:
    use_cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(7)
    train, test = make_datasets()
    sampler = DistributedSampler(train, shuffle=True, seed=7)
    loader = DataLoader(train, batch_size=64 // world_size, sampler=sampler)
    model = DistributedDataParallel(make_model().to(device))
    torch.manual_seed(7 + rank)  # different dropout masks on each rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()

    model.eval()
    correct = torch.zeros(1, device=device)
    with torch.no_grad():
        for index in range(rank, len(test), world_size):  # each sample once, without padding
            image, label = test[index]
            correct += model.module(image[None].to(device)).argmax(1) == label.to(device)
    dist.all_reduce(correct)
    if rank == 0:
        print(f"accuracy {100 * correct.item() / len(test):.1f} % on {len(test)} images")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
