"""Train a classifier in your own loop, on any number of processes.

    python train.py                              one process
    paceline run --nproc-per-node 2 train.py     two; torchrun, srun and mpirun work as well

The parts that you replace are marked with TODO.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split

import paceline


def make_data() -> tuple[Any, Any]:
    """The data for training and for evaluation. TODO: your datasets."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2500, 20, generator=generator)
    labels = features[:, :4].argmax(1)
    train, test = random_split(TensorDataset(features, labels), [2000, 500], generator=generator)
    return train, test


def make_model() -> nn.Module:
    """TODO: your model."""
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))


def score(model: nn.Module, batch: Any) -> dict[str, Any]:
    """What is added up over the samples of the evaluation, by name."""
    features, labels = batch
    return {"accuracy": ((model(features).argmax(1) == labels).sum(), len(labels))}


def main() -> None:
    """Train, save, resume and evaluate."""
    train, test = make_data()
    with paceline.join(seed=7) as job:  # seeds all generators, also those of new models
        model = paceline.ddp(job, make_model().to(job.device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

        # A loader's batch is one forward of one process. A step has `global_batch` samples of all processes
        # together, so the result does not depend on their number.
        loader = DataLoader(train, batch_size=32, shuffle=True)
        batches = paceline.Batches(job, loader, global_batch=64)

        # A job that is killed continues after its last checkpoint when it is started again.
        checkpoints = paceline.Checkpoints("runs/train/checkpoints", every_epochs=1)
        training = paceline.Training(job, model, optimizer, batches, checkpoints=checkpoints)
        training.report("runs/train", progress=True)

        for step in training.steps(epochs=10):
            for features, labels in step:  # the samples of this process, on its device
                loss = functional.cross_entropy(model(features), labels)
                step.backward(loss)
            step.update(clip_norm=1.0)
            training.log(loss=step.loss)  # the mean over all processes

        result = paceline.evaluate(job, model, test, score)  # each sample once, over all processes
        training.export("runs/train/model.pth")
        if job.rank == 0:
            print(f"accuracy {result.accuracy:.3f} on {result.num_samples} samples")


if __name__ == "__main__":
    main()
