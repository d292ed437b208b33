"""Each layout of 2 and 4 ranks: step time beside torch code written by hand, and memory beside DDP.

    python benchmarks/layouts.py [--rounds 9] [--steps 6] [--width 256] [--only "fsdp on 4"]

A GPT of 4 blocks trains on random tokens with AdamW. The two sides share the process group of one job and
take turns, a round of steps each; their losses must agree. The table shows medians over rounds, the ratio of
paceline to the code by hand with its middle half, and bytes of parameters, gradients and optimizer state that
a rank holds before an update, beside what DDP holds.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tables import publish, ratio_row
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline
from paceline import Mesh
from paceline.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt_3d import GPT, LENGTH, SYMBOLS, wrap

LAYOUTS = {
    "ddp on 2": Mesh(dp_replicate=2),
    "fsdp on 2": Mesh(dp_shard=2),
    "tp on 2": Mesh(tp=2),
    "pp on 2": Mesh(pp=2),
    "ddp on 4": Mesh(dp_replicate=4),
    "fsdp on 4": Mesh(dp_shard=4),
    "hsdp on 4": Mesh(dp_replicate=2, dp_shard=2),
    "tp x fsdp on 4": Mesh(tp=2, dp_shard=2),
    "pp x fsdp on 4": Mesh(pp=2, dp_shard=2),
    "pp x tp on 4": Mesh(pp=2, tp=2),
}
BATCH, WARM_UP = 32, 3
CHUNKS = 4  # micro-batches of a pipeline
HEADS = 4

Step = Callable[[], Any]  # runs one optimizer step and returns the loss, which `float` reads


def by_hand(job: paceline.Job, model: nn.Module, ids: torch.Tensor) -> tuple[Step, Any]:
    """The layout in plain torch, with torch's averages of gradients."""
    mesh, devices, data = job.mesh, job.device_mesh, job.data
    if mesh.pp > 1:
        return pipeline_by_hand(job, model, ids)
    if mesh.tp > 1:
        split_layers(model.layers, devices["tp"])
    if mesh.dp_shard > 1:
        names = [n for n in ("dp_replicate", "dp_shard") if mesh.axes[n] > 1]
        for layer in (*model.layers, model):
            fully_shard(layer, mesh=devices[tuple(names)], reshard_after_forward=layer is not model)
    elif mesh.tp == 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.arange(data.rank, BATCH, data.size)
    at = 0

    def step() -> torch.Tensor:
        nonlocal at
        chunk = ids[at : at + BATCH][rows]
        at = (at + BATCH) % len(ids)
        loss = F.cross_entropy(model(chunk[:, :-1]).flatten(0, 1), chunk[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, optimizer


def split_layers(layers: Iterable[nn.Module], mesh: Any) -> None:
    """Tensor parallel in blocks of the GPT."""
    plan = {f"attention.w{name}": ColwiseParallel() for name in "qkv"}
    plan |= {"attention.wo": RowwiseParallel()}
    plan |= {"feed_forward.fc1": ColwiseParallel(), "feed_forward.fc2": RowwiseParallel()}
    for block in layers:
        parallelize_module(block, mesh, plan)
        block.attention.n_heads //= mesh.size()


def pipeline_by_hand(job: paceline.Job, model: nn.Module, ids: torch.Tensor) -> tuple[Step, Any]:
    """Two stages with equal numbers of layers."""
    half = len(model.layers) // 2
    mesh, devices, data = job.mesh, job.device_mesh, job.data
    place = devices["pp"].get_local_rank()
    is_first = place == 0
    layers = model.layers[:half] if is_first else model.layers[half:]
    if mesh.tp > 1:
        split_layers(layers, devices["tp"])
    own = [model.embed, *model.layers[:half]] if is_first else [*model.layers[half:], model.norm]
    stage = nn.Sequential(*own) if is_first else nn.Sequential(*own, model.head)
    group = devices["pp"].get_group()
    if mesh.dp_shard > 1:  # as torchtitan: a stage stays gathered during a step
        for layer in (*layers, stage):
            fully_shard(layer, mesh=devices["dp_shard"], reshard_after_forward=False)
    rows = torch.arange(data.rank, BATCH, data.size)

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    schedule = Schedule1F1B(
        PipelineStage(stage, place, 2, job.device, group=group), CHUNKS, loss_fn=loss_of
    )
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    at = 0

    def step() -> torch.Tensor:
        nonlocal at
        chunk = ids[at : at + BATCH][rows]
        at = (at + BATCH) % len(ids)
        losses: list[torch.Tensor] = []
        inputs = (chunk[:, :-1],) if is_first else ()
        schedule.step(*inputs, target=chunk[:, 1:], losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else torch.tensor(math.nan)

    return step, optimizer


def by_paceline(job: paceline.Job, model: nn.Module, ids: torch.Tensor) -> tuple[Step, Any]:
    model = wrap(job, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(ids[:, :-1], ids[:, 1:])
    chunk = BATCH // job.data.size // CHUNKS if job.mesh.pp > 1 else None
    batches = paceline.Batches(job, data, global_batch=BATCH, micro_batch=chunk, shuffle=False)
    training = paceline.Training(job, model, optimizer, batches)
    steps: Iterator[paceline.Step] = training.steps()

    def loss_of(batch: Any) -> torch.Tensor:
        logits = model(batch[0]).flatten(0, 1)
        return F.cross_entropy(logits, batch[1].flatten(), reduction="sum") / ids[0, 1:].numel()

    def step() -> paceline.StepLoss:
        each = next(steps)
        each.run(loss_of, reduction="sum")
        each.update()
        return each.loss

    return step, optimizer


def held_bytes(optimizer: torch.optim.Optimizer, gradients: int) -> int:
    """Bytes of parameters and of the optimizer's state on this rank, and `gradients`."""
    found = gradients
    for p in [p for group in optimizer.param_groups for p in group["params"]]:
        for tensor in (p, *optimizer.state[p].values()):
            found += size_of(tensor) if isinstance(tensor, torch.Tensor) else 0
    return found


def size_of(tensor: torch.Tensor) -> int:
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.numel() * own.element_size()


def work(job: paceline.Job, width: int, rounds: int, steps: int) -> dict[str, Any]:
    """One rank: times of a step in each round by side, the last losses, and bytes held."""
    torch.set_num_threads(1)
    count = BATCH * (WARM_UP + rounds * steps)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, len(SYMBOLS), (count, LENGTH + 1), generator=generator)
    sides, gradients = {}, 0
    for name, build in (("hand", by_hand), ("paceline", by_paceline)):
        torch.manual_seed(0)
        sides[name] = build(job, GPT(width, HEADS, depth=4), ids)
    optimizer = sides["paceline"][1]

    def measure(*_: Any) -> None:
        nonlocal gradients
        held = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        gradients = sum(map(size_of, held))

    hook = optimizer.register_step_pre_hook(measure)
    losses: dict[str, float] = {}
    for name, (step, _) in sides.items():
        for _ in range(WARM_UP):
            losses[name] = float(step())
    hook.remove()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, (step, _) in sides.items():
            took = []
            for _ in range(steps):
                began = time.perf_counter()
                step()
                took.append(time.perf_counter() - began)
            times[name].append(statistics.median(took))
    return {"times": times, "losses": losses, "held": held_bytes(optimizer, gradients)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--only", choices=LAYOUTS)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    held: dict[str, float] = {}
    for name, mesh in LAYOUTS.items():
        if options.only not in (None, name):
            continue
        nproc = mesh.data_size * mesh.tp * mesh.pp
        arguments = (options.width, options.rounds, options.steps)
        ranks = run_ranks(work, *arguments, nproc=nproc, mesh=mesh, deadline_s=1800)
        losses = [rank["losses"]["hand"] for rank in ranks]
        hand = statistics.mean(loss for loss in losses if not math.isnan(loss))
        ours = ranks[0]["losses"]["paceline"]
        if abs(hand - ours) > 1e-3 * hand:
            raise SystemExit(f"{name}: the loss by hand is {hand}, of paceline {ours}")
        times = ranks[0]["times"]
        held[name] = max(rank["held"] for rank in ranks)
        base = held.get(f"ddp on {nproc}")
        rows.append(
            {
                "layout": name,
                "hand_ms": 1e3 * statistics.median(times["hand"]),
                "paceline_ms": 1e3 * statistics.median(times["paceline"]),
                **ratio_row(times["paceline"], times["hand"]),
                "held_mb": held[name] / 2**20,
                "of_ddp": held[name] / base if base else "",
            }
        )
        print(rows[-1], flush=True)
    publish("layouts", rows, batch=BATCH, width=options.width, rounds=options.rounds)


if __name__ == "__main__":
    main()
