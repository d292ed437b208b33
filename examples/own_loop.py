"""Train on the handwritten digits with your own loop and the parts of Paceline.

    paceline run --nproc-per-node 2 examples/own_loop.py

Shows an average of the weights that is saved in the checkpoints, a learning rate schedule, gradient clipping,
accumulation over micro-batches, and early stopping. Kill the script and start it again: it resumes from the
last checkpoint.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from digits import make_datasets, make_model, score
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import paceline


def cosine(step: int, *, warm_up: int = 20, total: int = 300) -> float:
    """The factor of the learning rate after `step` optimizer steps. It does not depend on the world size."""
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / (total - warm_up))))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--epochs", type=int, default=12)
    options.add_argument("--folder", default="runs/own_loop")
    args = options.parse_args()
    train, test = make_datasets()
    with paceline.join(seed=7) as job:
        model = paceline.ddp(job, make_model().to(job.device))
        ema = AveragedModel(paceline.unwrap(model), multi_avg_fn=get_ema_multi_avg_fn(0.98))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        batches = paceline.Batches(job, train, global_batch=64, micro_batch=16)
        training = paceline.Training(
            job,
            model,
            optimizer,
            batches,
            schedule=cosine,
            checkpoints=paceline.Checkpoints(f"{args.folder}/checkpoints", every_epochs=1, keep=2),
        )
        training.keep(ema=ema)
        training.report(args.folder, progress=True)

        for step in training.steps(epochs=args.epochs):
            for images, labels in step:
                step.backward(F.cross_entropy(model(images), labels))
            step.update(clip_norm=1.0)
            ema.update_parameters(paceline.unwrap(model))
            training.log(loss=step.loss, grad_norm=step.grad_norm)
            if step.ends_epoch:
                accuracy = paceline.evaluate(job, ema, test, score).accuracy
                training.log(accuracy=accuracy)
                if accuracy > 0.995:
                    step.stop()

        result = paceline.evaluate(job, ema, test, score)
        if job.rank == 0:
            print(f"accuracy {100 * result.accuracy:.1f} % on {result.num_samples} images")


if __name__ == "__main__":
    main()
