"""before.py with Paceline, on any number of processes: data loader, schedule, validation, checkpoints.

paceline run --nproc-per-node 2 examples/after.py
"""

import torch
import torch.nn.functional as F
from digits import make_datasets
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import paceline

EPOCHS = 5


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


def score(model, batch):
    images, labels = batch
    logits = model(images)
    return {
        "loss": (F.cross_entropy(logits, labels, reduction="sum"), len(labels)),
        "accuracy": ((logits.argmax(1) == labels).sum(), len(labels)),
    }


def main(job):
    train, test = make_datasets()
    loader = DataLoader(train, batch_size=64, shuffle=True, num_workers=1)
    test_loader = DataLoader(test, batch_size=64)
    model = paceline.sync_batchnorm(job, make_model().to(job.device))
    model = paceline.ddp(job, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = paceline.Batches(job, loader, global_batch=64)
    steps = EPOCHS * batches.steps_per_epoch
    schedule = LambdaLR(optimizer, lambda step: max(0.05, 1 - step / steps))
    saves = paceline.Checkpoints("runs/after/checkpoints", every_s=600)
    training = paceline.Training(
        job, model, optimizer, batches, schedule=schedule, checkpoints=saves
    )
    training.report("runs/after")
    for step in training.steps(epochs=EPOCHS):
        for images, labels in step:
            loss = F.cross_entropy(model(images), labels)
            step.backward(loss)
        step.update(clip_norm=1.0)
        training.log(loss=step.loss)
        if step.ends_epoch:
            result = paceline.evaluate(job, model, test_loader, score)
            if job.rank == 0:
                print(f"epoch {step.epoch}: loss {result.loss:.3f}, accuracy {result.accuracy:.3f}")
    training.export("model.pth")


if __name__ == "__main__":
    with paceline.join(seed=7) as job:
        main(job)
