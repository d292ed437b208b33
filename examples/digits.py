"""Train a small convolutional network on scikit-learn's handwritten digits, on any number of processes.

    paceline run --nproc-per-node 2 examples/digits.py

The data set has 1,797 images of 8 x 8 pixels; 360 are held out for evaluation. The script writes to runs/demo
metrics.jsonl (one JSON line per step), checkpoints, and model.pth.
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import paceline

HELD_OUT = 360


def make_datasets() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[HELD_OUT:], order[:HELD_OUT]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def score(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    images, labels = batch
    logits = model(images)
    return {
        "loss": (F.cross_entropy(logits, labels, reduction="sum"), len(labels)),
        "accuracy": ((logits.argmax(1) == labels).sum(), len(labels)),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--epochs", type=int, default=15)
    options.add_argument("--folder", default="runs/demo")
    args = options.parse_args()
    train, test = make_datasets()
    trainer = paceline.Trainer(
        make_model,
        F.cross_entropy,
        lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        train,
        global_batch=64,
        validation=paceline.Validation(dataset=test, score=score),
    )
    with paceline.join(seed=7) as job:
        result = trainer.fit(args.epochs, folder=args.folder)
        if job.rank == 0:
            accuracy = 100 * result.evaluation.accuracy
            print(f"accuracy {accuracy:.1f} % on {result.evaluation.num_samples} images")


if __name__ == "__main__":
    main()
