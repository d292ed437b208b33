"""`paceline plan` beside measured steps: 2, 3 and 4 hosts, three links, three strategies.

    python benchmarks/plan.py predict       # into results/plan.json; commit it
    python benchmarks/plan.py measure       # adds the measured steps to it

The hosts are network namespaces of this machine, joined by links of a fixed rate (root only), with one rank
each. They train the workload "comm", whose gradients have 16.8 MB, with 128 samples per rank (weak scaling).

**predict** makes for each number of hosts the run that `plan` reads: as many trainings of one process at once,
without communication, so that each has the share of the cores that a rank will have. That is how ranks that
outnumber the cores are treated; the model knows nothing of it. The links of 100 Mbit/s and 1 Gbit/s are given
by their rate. Of the link without a limit `paceline doctor` measures what the hosts reach. No point is left out.

**measure** trains with each strategy, and takes the median step of clock.jsonl. The winner of a point is the
strategy with the shortest step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from collections.abc import Iterator

import torch.nn.functional as F

import paceline
from paceline.plan.model import Way, estimate
from paceline.plan.read import read_link, read_step
from paceline.report.run import load

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "e2e"))
from hosts import Hosts, hosts, missing_tool
from launching import finish
from tables import publish
from workloads import WORKLOADS

HOSTS = (2, 3, 4)
LINKS = {"100 Mbit": "100mbit", "1 Gbit": "1gbit", "unshaped": ""}
STRATEGIES = {"ddp": "DDP", "ddp fp16": "fp16", "fsdp": "FSDP"}
_DEADLINE_S = 120.0


def work(side: str, folder: str, steps: int) -> None:
    """One rank of a training."""
    workload = WORKLOADS["comm"]
    with paceline.join(device="cpu") as job:
        model: Any = workload.make()
        if side == "fsdp":
            model = paceline.fsdp(job, model, blocks="*")
        else:
            model = paceline.ddp(job, model, compress="fp16" if side.endswith("fp16") else None)
        batches = paceline.Batches(
            job,
            workload.data(job.world_size, 4),
            global_batch=workload.batch * job.world_size,
            sample_randomness=False,
        )
        optimizer = workload.optimizer(model)
        training = paceline.Training(job, model, optimizer, batches, desync_every=0)
        training.report(folder)
        for step in training.steps(until=steps):
            for x, y in step:
                step.backward(F.mse_loss(model(x), y))
            step.update()


@contextmanager
def linked(count: int, rate: str) -> Iterator[Hosts]:
    with hosts(count) as made:
        for number in range(count if rate else 0):
            shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            made.call(number, "tc", "qdisc", "add", "dev", "eth0", "root", *shape)
        yield made


def train(made: Hosts, count: int, side: str, steps: int, *, alone: bool = False) -> Any:
    """The step of a training over the hosts; alone: of one of as many trainings of one process."""
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for number in range(count):
            own = f"{folder}/{number if alone else 0}"
            words = ["run", "--nproc-per-node=1"]
            if not alone:
                words += [f"--nnodes={count}", f"--host={made.address(0)}"]
            words += [__file__, "work", side, own, str(steps)]
            running.append(made.start(number, words, Path.cwd(), OMP_NUM_THREADS="1"))
        for end in [finish(process, _DEADLINE_S) for process in running]:
            if end.code:
                raise SystemExit(end.err)
        return load(f"{folder}/0").record


if __name__ == "__main__":
    if sys.argv[1] == "work":
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        from paceline.plan.read import _median, _alone_s
        n, rate = int(sys.argv[2]), sys.argv[3]
        with linked(n, "") as made:
            base = read_step("x", train(made, n, "alone", 200, alone=True))
        print(base)
        with linked(n, rate) as made:
            words = ["run", f"--nnodes={n}", "--nproc-per-node=1", f"--host={made.address(0)}", "-m", "paceline", "doctor", "--json"]
            ends = [finish(p, 60) for p in [made.start(i, words, Path.cwd(), OMP_NUM_THREADS="1") for i in range(n)]]
            text = next(e.out for e in ends if "facts" in e.out)
            Path("/tmp/pl/s9/plan/doctor.json").write_text(text)
            measured = read_link("/tmp/pl/s9/plan/doctor.json")
            print(measured)
            link = read_link(rate.replace("m","M")+",50us") if rate else measured
            for side, kind in STRATEGIES.items():
              for l in (link, measured):
                e = estimate(base, l, Way(name=side, kind=kind), n, weak=True)
                print(side, "predicted", round(1e3*e.step_s,1), [round(1e3*x,1) for x in e.band_s], "exposed", round(1e3*e.exposed_s,1))
              steps = max(8, min(150, int(6/e.step_s)))
              rec = train(made, n, side, steps)
              w = rec.windows[1:]
              print(side, "measured", round(1e3*statistics.median(x.step_s for x in w),1), len(w), {k: round(1e3*statistics.median(sum(x.spent_s[k])/x.num_ranks/x.steps for x in w),1) for k in w[0].spent_s}, "exp", round(1e3*statistics.median(x.exposed_s for x in w),1), flush=True)
