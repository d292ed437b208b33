"""Kill the rank that saves the last step after a failure, or fill its disk, and check that nothing is lost.

    python benchmarks/last_save.py [--kills 100] [--full 5] [--seed 1]

    kills    rank 1 of 2 fails, and rank 0 is killed after a random time within its save of the last step;
             the next job must resume from the last commit, and the last one must end with equal bits
    full     rank 1 of 2 fails on a full disk (a tmpfs; needs root, otherwise skipped), and rank 0 cannot save

The table shows how often each outcome occurred.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tables import publish

import paceline
from paceline.checkpoint.reader import read
from paceline.checkpoint.store import committed, open_store, read_manifest
from paceline.testing import digest, run_failing_ranks, run_ranks


class SaveAndDie(paceline.Checkpoints):
    """Kills its process after a time within the save that follows a failure."""

    def __init__(self, folder: str, delay_s: float) -> None:
        super().__init__(folder, keep=2)
        self._delay_s = delay_s

    def save_after_failure(self, *args: Any, **options: Any) -> None:
        began = time.monotonic()
        timer = threading.Timer(self._delay_s, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
        super().save_after_failure(*args, **options)
        # Later runs are killed within this time.
        Path(str(self.folder), "took").write_text(str(time.monotonic() - began))


def fail_in_step(job: Any, folder: str, steps: int, delay_s: float, fails: str) -> tuple[int, str]:
    """Train so many steps more; the step after which this job resumed, and the digest of the weights.

    Args:
        fails: "" or what rank 1 does in the last step: "raises", or "fills" the disk before.
    """
    torch.manual_seed(2)
    model = paceline.ddp(job, torch.nn.Linear(1024, 1024))
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.utils.data.TensorDataset(torch.ones(64, 1024))
    batches = paceline.Batches(job, data, global_batch=4)
    checkpoints = SaveAndDie(folder, delay_s)
    training = paceline.Training(job, model, optimizer, batches, checkpoints=checkpoints)
    training.resume()
    start = training.number
    for step in training.steps(until=start + steps):
        if fails and job.rank == 1 and step.number == start + steps:
            if fails == "fills":
                with contextlib.suppress(OSError), Path(folder, "ballast").open("wb") as file:
                    while True:
                        file.write(bytes(1 << 16))
                        file.flush()
            raise ValueError("a step fails")
        step.run(lambda batch: model(batch[0]).square().mean())
        step.update()
    return start, digest(training.state_dict()["models"])


def kills_in_the_save(count: int, rng: random.Random) -> Counter[str]:
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        run_failing_ranks(fail_in_step, folder, 3, 60.0, "raises", nproc=2)
        newest = 2
        took_s = float(Path(folder, "took").read_text())
        for _ in range(count):
            began, delay_s = time.monotonic(), rng.uniform(0, 1.2 * took_s)
            run_failing_ranks(fail_in_step, folder, 3, delay_s, "raises", nproc=2)
            steps = committed(open_store(folder))
            found[outcome(folder, newest)] += 1
            found["the last step was saved"] += steps[-1] > newest
            found["not ended in 30 s"] += time.monotonic() - began > 30
            newest = steps[-1]
        start, end = run_ranks(fail_in_step, folder, 3, 60.0, "", nproc=2)[0]
        found["other resume"] += start != newest
        whole = run_ranks(fail_in_step, other, newest + 3, 60.0, "", nproc=2)[0][1]
        found["other end"] += end != whole
    return +found  # without zeros


def outcome(folder: str, before: int) -> str:
    """ "whole" if all checkpoints can be loaded, and the newest is that of `before` or two steps later."""
    store = open_store(folder)
    steps = committed(store)
    for step in steps:
        try:
            read(store, read_manifest(store, step))
        except Exception as error:
            return f"torn: {error}"
    return "whole" if steps[-1] in (before, before + 2) else f"lost: {before}, {steps}"


def full_disks(count: int, rng: random.Random) -> Counter[str]:
    found: Counter[str] = Counter()
    for _ in range(count):
        with tempfile.TemporaryDirectory() as folder:
            mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", folder]
            if subprocess.run(mount, capture_output=True, check=False).returncode:
                return found
            try:
                run_ranks(fail_in_step, folder, 2, 60.0, "", nproc=2)
                run_failing_ranks(fail_in_step, folder, rng.randrange(2, 5), 60.0, "fills", nproc=2)
                is_kept = committed(open_store(folder)) == [2]
                found[outcome(folder, 2) if is_kept else "saved on a full disk"] += 1
                Path(folder, "ballast").unlink()
                start, _ = run_ranks(fail_in_step, folder, 2, 60.0, "", nproc=2)[0]
                found["other resume"] += start != 2
            finally:
                subprocess.run(["umount", folder], check=True)
    return +found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, count in (("kills", 100), ("full", 5), ("seed", 1)):
        options.add_argument(f"--{name}", type=int, default=count)
    options.add_argument("--json", action="store_true", help="print JSON and write nothing")
    args = options.parse_args()
    rng = random.Random(args.seed)
    rows = [
        {"what": "kills", **kills_in_the_save(args.kills, rng)},
        {"what": "full", **full_disks(args.full, rng)},
    ]
    publish("last_save", rows, as_json=args.json)


if __name__ == "__main__":
    main()
