"""`paceline.diloco` beside synchronous DDP on slow links, and with a host that is cut off for a while.

    python benchmarks/diloco.py [--rate 100mbit] [--steps 300] [--start 600] [--only loss]
    python benchmarks/diloco.py --only cut [--steps 600]

**loss**: two hosts of one rank train the GPT of examples/char_lm.py on the source of a package of the
standard library, with links of this rate: synchronous DDP, and `diloco(every=50)` with each kind of
`outer_dtype` and with fragments. All sides use the same samples in the same steps. The loss is that of every
tenth line, which is not trained on.

The sides continue from weights that DDP has trained for `--start` steps, as in the paper. With `--start 0`
all begin with random weights, and the results are saved as `diloco_scratch`. The share of the time that
computes is that of the steps, at the median of those without an exchange, in the whole time; for DDP it is
the median step of `diloco` divided by its own.

**cut**: four hosts train with `--nnodes 3:4` and a checkpoint after each outer step. The link of one is cut
while the others take three outer steps, and then healed. The loss at the end is compared with that of a run
without a cut.

Fixed before the first run: the loss may be at most 1 % above that of DDP, or of the run without a cut; at
least 0.90 of the time must compute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from links import finish, hosts, read_result, sent_bytes, start_worker
from tables import publish
from torch.utils.data import Subset

import paceline

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from char_lm import GPT, PADDING, make_dataset

TOLERANCE = 1.01
EVERY = 50
SIDES: dict[str, dict[str, Any] | None] = {
    "DDP": None,
    "diloco": {},
    "diloco, int8": {"outer_dtype": "int8"},
    "local SGD": {"outer_lr": 1.0, "outer_momentum": 0.0},
    "local SGD, 2 fragments": {"outer_lr": 1.0, "outer_momentum": 0.0, "fragments": 2},
}


def _loss(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    logits = model(batch[0]).flatten(0, 1)
    loss = F.cross_entropy(logits, batch[1].flatten(), ignore_index=PADDING)
    return loss, int((batch[1] != PADDING).sum())


def _score(model: torch.nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, int]]:
    loss, count = _loss(model, batch)
    return {"loss": (loss * count, count)}


def work(side: str, steps: int, folder: str | None, weights: str | None, out: Path) -> None:
    """One rank of a job."""
    lines = make_dataset(Path(asyncio.__file__).parent)
    held_out = [i for i in range(len(lines)) if i % 10 == 0]
    trained = [i for i in range(len(lines)) if i % 10]
    options = SIDES[side]
    with paceline.join(seed=7) as job:
        torch.manual_seed(7)
        model: Any = GPT(width=128)
        has_start = weights is not None and Path(weights).exists()
        if weights is not None and has_start:
            paceline.load_weights(model, weights)
        lr = 1e-3 if has_start else 2e-3
        if options is None:
            model = paceline.ddp(job, model)
        else:
            model = paceline.diloco(job, model, every=EVERY, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.1)
        batches = paceline.Batches(job, Subset(lines, trained), global_batch=48)
        checkpoints = None if folder is None else paceline.Checkpoints(folder, every_steps=EVERY)
        training = paceline.Training(
            job,
            model,
            optimizer,
            batches,
            schedule=schedule,
            count="tokens",
            checkpoints=checkpoints,
        )
        times, sent = [], [sent_bytes()]
        began = time.perf_counter()
        for step in training.steps(until=steps):
            step.run(lambda batch: _loss(model, batch))
            step.update(clip_norm=1.0)
            times.append((now := time.perf_counter()) - began)
            began = now
            if folder is not None and job.rank == 0:
                (Path(folder).parent / "step").write_text(f"{step.number} {job.world_size}")
        sent.append(sent_bytes())
        if weights is not None and not has_start:
            training.export(weights)
        result = paceline.evaluate(job, model, Subset(lines, held_out), _score)
        if job.rank == 0:
            found = {"times": times, "sent": sent[1] - sent[0], "loss": float(result.loss)}
            out.write_text(json.dumps(found))


def _train(rate: str | None, side: str, steps: int, weights: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, hosts(2, rate) as made:
        out = Path(folder) / "out.json"
        words = ["--nnodes=2", __file__, f"--steps={steps}", f"--side={side}"]
        words += [] if weights is None else [f"--weights={weights}"]
        running = [start_worker(made, n, words, out) for n in range(2)]
        found: dict[str, Any] = read_result([finish(each, 700) for each in running], out)
        return found


def measure_loss(rate: str, steps: int, start: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.pt" if start else None
        if start:
            begin = _train(None, "DDP", start, weights)
            rows.append({"what": f"the start: {start} steps of DDP", "loss": begin["loss"]})
        rows += _measure_sides(rate, steps, weights)
    return rows


def _measure_sides(rate: str, steps: int, weights: Path | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for side in SIDES:
        found = _train(rate, side, steps, weights)
        times = found["times"][5:]
        print(side, found["loss"], found["sent"], file=sys.stderr, flush=True)
        rows.append(
            {
                "what": f"{rate}: {side}",
                "step_ms": 1e3 * statistics.fmean(times),
                "computes": statistics.median(times) / statistics.fmean(times),
                "sent_kib": found["sent"] / steps / 1024,
                "loss": found["loss"],
                "ratio": found["loss"] / rows[0]["loss"] if rows else 1.0,
            }
        )
    median_s = rows[1]["computes"] * rows[1]["step_ms"]
    rows[0]["computes"] = median_s / rows[0]["step_ms"]
    return rows


def measure_cut(steps: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for what in ("4 hosts", "4 hosts, one cut off for 3 outer steps"):
        with tempfile.TemporaryDirectory() as folder, hosts(4) as made:
            out = Path(folder) / "out.json"
            words = ["--nnodes=3:4", "--max-restarts=5", "--rdzv-conf=last_call_timeout=2"]
            words += [__file__, f"--steps={steps}", "--side=diloco"]
            words += [f"--folder={Path(folder) / 'checkpoints'}"]
            running = [start_worker(made, n, words, out) for n in range(4)]
            if rows:
                at = _wait_step(Path(folder), EVERY + EVERY // 2, 4)
                made.cut(3)
                at = _wait_step(Path(folder), at - at % EVERY + 3 * EVERY, 3)
                made.heal(3)
                _wait_step(Path(folder), at, 4)
            ends = [finish(each, 700) for each in running]
            found = read_result(ends[:3], out)
        loss = found["loss"]
        rows.append({"what": what, "loss": loss, "ratio": loss / rows[0]["loss"] if rows else 1.0})
    return rows


def _wait_step(folder: Path, step: int, world: int) -> int:
    """Wait until so many ranks have done this step; returns the step."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        words = (folder / "step").read_text().split() if (folder / "step").exists() else []
        if len(words) == 2 and int(words[1]) == world and int(words[0]) >= step:
            return int(words[0])
        time.sleep(0.02)
    raise SystemExit(f"step {step} was not done by {world} ranks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--start", type=int, default=600)
    parser.add_argument("--only", choices=["loss", "cut"])
    parser.add_argument("--json", action="store_true")
    for name in ("--side", "--folder", "--weights"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.side, options.steps, options.folder, options.weights, options.worker)
        return
    facts = {"as_json": options.json, "every": EVERY, "steps": options.steps}
    if options.only != "cut":
        rows = measure_loss(options.rate, options.steps, options.start)
        publish("diloco" if options.start else "diloco_scratch", rows, **facts)
    if options.only != "loss":
        publish("diloco_cut", measure_cut(options.steps), **facts)


if __name__ == "__main__":
    main()
