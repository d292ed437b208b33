"""Steps on GPUs: Paceline and a plain PyTorch loop, on each GPU of this host.

    python benchmarks/gpu.py [--rounds 9] [--only tiny|gpt]

    tiny  MLP 32-32-8, batch 16, AdamW, fp32: the host takes most of the time
    gpt   decoder of 12 layers with d 1024, 16 sequences of 512, AdamW(fused=True), bf16: the GPU does

The data is in host memory. The plain loop copies each batch from pinned memory. With several GPUs it uses DDP
over NCCL. The sides take turns; a round ends with a synchronization and reports the time of a step. The table
shows medians over rounds, and the ratio to the plain loop in the same round with its middle half. Without a
GPU nothing is measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tables import publish, ratio_row
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline
from paceline.testing import run_ranks

WARM_UP = 10  # steps
VOCAB, LENGTH, WIDTH, LAYERS = 8192, 512, 1024, 12


@dataclass(frozen=True)
class Workload:
    batch: int
    steps: int  # of a round
    bf16: bool


WORK = {"tiny": Workload(16, 400, False), "gpt": Workload(16, 20, True)}


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH, 16, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], ids.device)
        hidden = self.blocks(self.tokens(ids), mask=mask, is_causal=True)
        out: torch.Tensor = self.head(hidden).flatten(0, 1)
        return out


def make(name: str, job: Any) -> tuple[nn.Module, TensorDataset]:
    """The model, and 64 batches of data for each rank."""
    torch.manual_seed(0)
    samples = WORK[name].batch * 64 * job.world_size
    if name == "tiny":
        net: nn.Module = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
        return net, TensorDataset(torch.randn(samples, 32), torch.randint(0, 8, (samples,)))
    ids = torch.randint(0, VOCAB, (samples, LENGTH + 1))
    return GPT(), TensorDataset(ids[:, :-1], ids[:, 1:])


def plain_loop(job: Any, name: str) -> Iterator[None]:
    work = WORK[name]
    net, data = make(name, job)
    model = net.to(job.device)
    if job.world_size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=work.bf16)
    x_all, y_all = data.tensors
    own = torch.arange(job.rank, len(data), job.world_size).split(work.batch)
    while True:
        for ids in own:
            x, y = (
                part[ids].pin_memory().to(job.device, non_blocking=True) for part in (x_all, y_all)
            )
            with torch.autocast("cuda", torch.bfloat16, enabled=work.bf16):
                loss = F.cross_entropy(model(x), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def paceline_loop(job: Any, name: str) -> Iterator[None]:
    work = WORK[name]
    net, data = make(name, job)
    model = paceline.ddp(job, net.to(job.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=work.bf16)
    batches = paceline.Batches(
        job, data, global_batch=work.batch * job.world_size, sample_randomness=False
    )
    precision = "bf16" if work.bf16 else "fp32"
    training = paceline.Training(job, model, optimizer, batches, precision=precision)
    for step in training.steps(until=1 << 30):
        for x, y in step:
            loss = F.cross_entropy(model(x), y.flatten(), reduction="sum")
            step.backward(
                loss / (y[0].numel() if y.dim() > 1 else 1), count=len(y), reduction="sum"
            )
        step.update()
        yield


SIDES = {"plain loop": plain_loop, "paceline": paceline_loop}


def measure(job: Any, name: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step, for each side and round."""
    loops = {side: loop(job, name) for side, loop in SIDES.items()}
    for loop in loops.values():
        for _ in range(WARM_UP):
            next(loop)
    found: dict[str, list[float]] = {side: [] for side in loops}
    for _ in range(rounds):
        for side, loop in loops.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(WORK[name].steps):
                next(loop)
            torch.cuda.synchronize()
            found[side].append((time.perf_counter() - began) / WORK[name].steps)
    for loop in loops.values():
        loop.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=list(WORK), nargs="+", default=list(WORK))
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    if not gpus:
        print("skipped: this machine has no CUDA device")
        return
    rows = []
    for name in options.only:
        found = run_ranks(measure, name, options.rounds, nproc=gpus, deadline_s=1200)[0]
        for side, times in found.items():
            row: dict[str, Any] = {"workload": name, "side": side}
            row["step_ms"] = 1e3 * statistics.median(times)
            rows.append(row | ratio_row(times, found["plain loop"]))
    name, version = torch.cuda.get_device_name(), torch.version.cuda
    publish("gpu", rows, rounds=options.rounds, gpus=gpus, gpu=name, cuda=version)


if __name__ == "__main__":
    main()
