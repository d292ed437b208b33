"""A small GPT that learns to write Python from the source code of the standard library.

    paceline run --nproc-per-node 2 examples/char_lm.py

Shows a loss per token (padding does not count), bf16, and accumulation over micro-batches.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

WINDOW = 64
VOCABULARY = 128
PADDING = -100  # the default `ignore_index` of cross_entropy


def make_dataset(package: Path = Path(json.__file__).parent) -> TensorDataset:
    """Lines of a package, padded to `WINDOW` characters. Each character predicts the next one."""
    files = sorted(package.glob("*.py"))
    text = "".join(path.read_text() for path in files)
    lines = [line for line in text.splitlines() if len(line.strip()) > 1]
    # Encode all lines once, not in every epoch.
    inputs = torch.zeros(len(lines), WINDOW, dtype=torch.long)
    targets = torch.full((len(lines), WINDOW), PADDING)
    for row, line in enumerate(lines):
        codes = [min(ord(c), VOCABULARY - 1) for c in line + "\n"][: WINDOW + 1]
        inputs[row, : len(codes) - 1] = torch.tensor(codes[:-1])
        targets[row, : len(codes) - 1] = torch.tensor(codes[1:])
    return TensorDataset(inputs, targets)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(WINDOW, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--epochs", type=int, default=4)
    options.add_argument("--folder", default="runs/char_lm")
    args = options.parse_args()
    with paceline.join(seed=7) as job:
        model = paceline.ddp(job, GPT().to(job.device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
        batches = paceline.Batches(job, make_dataset(), global_batch=64, micro_batch=16)
        training = paceline.Training(
            job, model, optimizer, batches, precision="bf16", count="tokens"
        )
        training.report(args.folder, progress=True)
        for step in training.steps(epochs=args.epochs):
            for inputs, targets in step:
                logits = model(inputs)
                loss = F.cross_entropy(
                    logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING
                )
                step.backward(loss, count=int((targets != PADDING).sum()))
            step.update(clip_norm=1.0)
            training.log(loss=step.loss)
            if step.ends_epoch:
                loss_now = float(step.loss)  # a sum over ranks, so every rank calls it
                if job.rank == 0:
                    print(f"epoch {step.epoch}: {loss_now:.3f} nats a character")


if __name__ == "__main__":
    main()
