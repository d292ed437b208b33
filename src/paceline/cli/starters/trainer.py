"""Train a classifier without writing a loop, on any number of processes.

    python train.py                              one process
    paceline run --nproc-per-node 2 train.py     two; torchrun, srun and mpirun work as well

The parts that you replace are marked with TODO.
"""

from typing import Any

import torch
from torch import nn
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
    """TODO: your model. It is called after the generators are seeded."""
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))


def score(model: nn.Module, batch: Any) -> dict[str, Any]:
    """What is added up over the samples of the evaluation, by name."""
    features, labels = batch
    return {"accuracy": ((model(features).argmax(1) == labels).sum(), len(labels))}


def main() -> None:
    """Train, save, resume and evaluate."""
    train, test = make_data()
    trainer = paceline.Trainer(
        make_model,
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        # A loader's batch is one forward of one process. A step has `global_batch` samples of all processes
        # together, so the result does not depend on their number.
        DataLoader(train, batch_size=32, shuffle=True),
        global_batch=64,
        validation=paceline.Validation(dataset=test, score=score, every_epochs=5),
    )
    with paceline.join(seed=7) as job:
        # The folder gets metrics, checkpoints and weights. A job that is killed continues there.
        result = trainer.fit(epochs=10, clip_norm=1.0, folder="runs/train")
        if job.rank == 0 and result.evaluation is not None:
            evaluation = result.evaluation
            print(f"accuracy {evaluation.accuracy:.3f} on {evaluation.num_samples} samples")


if __name__ == "__main__":
    main()
