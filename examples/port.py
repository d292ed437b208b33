"""The smallest port of a training loop, which the README shows as a diff.

    paceline run --nproc-per-node 2 --max-restarts 3 examples/port.py

Kill a rank, or stop the job and start it again: it resumes from its last checkpoint, in runs/port.
"""

import torch
from torch.nn import Linear, ReLU, Sequential
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline


def main(job):
    x = torch.randn(4000, 20)
    loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=64, shuffle=True)
    model = Sequential(Linear(20, 64), ReLU(), Linear(64, 4))
    model = paceline.ddp(job, model.to(job.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = paceline.Batches(job, loader, global_batch=64)
    saves = paceline.Checkpoints("runs/port/checkpoints", every_epochs=10)
    training = paceline.Training(job, model, optimizer, batches, checkpoints=saves)
    training.report("runs/port", progress=True)
    for step in training.steps(epochs=200):
        for x, y in step:
            step.backward(cross_entropy(model(x), y))
        step.update()
        training.log(loss=step.loss)


with paceline.join(seed=7) as job:
    main(job)
