"""Train one small GPT under any layout of the ranks: replicas, shards, split layers, stages, their products.

    paceline run --nproc-per-node 4 examples/gpt_3d.py                       # replicas (DDP)
    paceline run --nproc-per-node 4 examples/gpt_3d.py --dp-shard 4          # FSDP2
    paceline run --nproc-per-node 4 examples/gpt_3d.py --tp 2 --dp-shard 2   # tensor parallel and FSDP2
    paceline run --nproc-per-node 4 examples/gpt_3d.py --pp 2                # pipelines of 2 stages
    paceline run --nproc-per-node 8 examples/gpt_3d.py --pp 2 --tp 2 --dp-shard 2   # all three

The model learns sums such as "17+25=42.". Every layout gives the losses of one process, to rounding. Kill a
rank, or start the script again with another layout: it resumes from the last checkpoint.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

SYMBOLS = "0123456789+=."
LENGTH = 9  # of the longest line, less one character


def make_datasets() -> tuple[TensorDataset, TensorDataset]:
    """All sums of two numbers below 40, in a fixed random order. Each character predicts the next one."""
    lines = [f"{a}+{b}={a + b}." for a in range(40) for b in range(40)]
    codes = torch.tensor(
        [[SYMBOLS.index(c) for c in line.ljust(LENGTH + 1, ".")] for line in lines]
    )
    codes = codes[torch.randperm(len(lines), generator=torch.Generator().manual_seed(0))]
    return tuple(TensorDataset(x[:, :-1], x[:, 1:]) for x in codes.split((1400, 200)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n_heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        def heads(y):  # under tensor parallel, this rank's heads
            return y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

        q, k, v = heads(self.wq(x)), heads(self.wk(x)), heads(self.wv(x))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed_forward = Attention(width, heads), FeedForward(width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Embed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(len(SYMBOLS), width), nn.Embedding(LENGTH, width)

    def forward(self, ids):
        return self.tokens(ids) + self.places.weight[: ids.shape[1]]


# How `paceline.tensor_parallel` splits linear layers: by their outputs or by their inputs.
TP_PLAN = {
    "layers.*.attention.w[qkv]": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.feed_forward.fc1": "colwise",
    "layers.*.feed_forward.fc2": "rowwise",
}


class GPT(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.embed = Embed(width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.tp_plan = TP_PLAN
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(SYMBOLS))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def wrap(job: paceline.Job, model: nn.Module) -> nn.Module:
    """The model in the layout of the job's mesh."""
    mesh = job.mesh
    if mesh.pp > 1:
        model = paceline.pipeline(job, model)
    if mesh.tp > 1:
        model = paceline.tensor_parallel(job, model)
    if mesh.tp > 1 or mesh.dp_shard > 1:
        return paceline.fsdp(job, model, blocks=Block)
    return model if mesh.pp > 1 else paceline.ddp(job, model)


def token_loss(model, batch):
    ids, targets = batch
    logits = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss, targets.numel()


def score(model, batch):
    loss, count = token_loss(model, batch)
    return {"loss": (loss * count, count)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--dp-replicate", type=int, default=-1, help="replicas; -1: the rest")
    options.add_argument("--dp-shard", type=int, default=1, help="ranks that share the parameters")
    options.add_argument("--tp", type=int, default=1, help="ranks that compute each layer together")
    options.add_argument("--pp", type=int, default=1, help="stages of layers")
    options.add_argument("--epochs", type=int, default=8)
    options.add_argument("--folder", default="runs/gpt_3d")
    args = options.parse_args()
    train, test = make_datasets()

    degrees = {name: getattr(args, name) for name in ("dp_replicate", "dp_shard", "tp", "pp")}
    with paceline.join(seed=3, mesh=paceline.Mesh(**degrees)) as job:
        model = wrap(job, GPT().to(job.device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        batches = paceline.Batches(job, train, global_batch=56, micro_batch=14)
        checkpoints = paceline.Checkpoints(f"{args.folder}/checkpoints", every_epochs=1, keep=2)
        settings = {"count": "tokens", "checkpoints": checkpoints}
        training = paceline.Training(job, model, optimizer, batches, **settings)
        training.report(args.folder, progress=True)

        for step in training.steps(epochs=args.epochs):
            step.run(lambda batch: token_loss(model, batch))
            step.update(clip_norm=1.0)
            training.log(loss=step.loss)

        training.export(f"{args.folder}/model.pth")  # the whole model, as one process has it
        loss = paceline.evaluate(job, model, test, score).loss
        if job.rank == 0:
            print(f"{job.mesh}: loss {loss:.4f} on sums that were not trained on")


if __name__ == "__main__":
    main()
