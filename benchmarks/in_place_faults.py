"""Inject random faults into a job with `--recover in-place`: nothing may be lost, and nothing may hang.

    python benchmarks/in_place_faults.py [--faults 500] [--per-job 50] [--backends shm,gloo] [--seed 1]

A job of 3 ranks trains until its faults have been injected, every two seconds on average, in random ranks at
random moments: also while the ranks start, save, or recover from another fault.

    kill, segv   SIGKILL, SIGSEGV
    stop         SIGSTOP
    raise        the script raises an exception
    break        all TCP connections of the rank are shut down
    close        all sockets of the rank are closed, also that to the launcher

The digest of the weights after each step must be that of a run without faults. A job without a new step for
two minutes is stuck. The reasons of restarts are printed.

Over Gloo the model has one parameter: torch's DDP arranges several anew after the first step of a process,
and Gloo's sum of three numbers depends on their place.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tables import publish

RANKS = 3
STUCK_S = 120.0
INTERVAL_S = 2.0
BREAK, CLOSE, RAISE = signal.SIGRTMIN, signal.SIGRTMIN + 1, signal.SIGRTMIN + 2
KINDS = {
    "kill": signal.SIGKILL,
    "segv": signal.SIGSEGV,
    "stop": signal.SIGSTOP,
    "raise": RAISE,
    "break": BREAK,
    "close": CLOSE,
}


def train(backend: str) -> None:
    """The training, as one rank. It ends after a step in which the file `stop` exists, or in step UNTIL."""
    accept_faults()
    write("ranks", [int(os.environ["RANK"]), os.getpid()])
    import torch
    from torch import nn

    import paceline
    from paceline.testing import digest

    until = int(os.environ["UNTIL"])
    with paceline.join(backend=backend) as job:
        torch.manual_seed(0)
        x = torch.randn(4000, 32)
        layers = [nn.Linear(32, 64), nn.ReLU()] if backend == "shm" else []
        model = nn.Sequential(
            *layers, nn.Dropout(0.1), nn.Linear(64 if layers else 32, 8, bias=bool(layers))
        )
        model = paceline.ddp(job, model)
        optimizer = torch.optim.AdamW(model.parameters())
        data = torch.utils.data.TensorDataset(x, x[:, :8] * 2)
        batches = paceline.Batches(job, data, global_batch=24, micro_batch=4)
        training = paceline.Training(
            job,
            model,
            optimizer,
            batches,
            schedule=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500),
            checkpoints=paceline.Checkpoints("kept", every_steps=100),
        )
        for step in training.steps(until=until):
            for bx, by in step:
                step.backward(nn.functional.mse_loss(model(bx), by))
            step.update()
            if job.rank == 0:
                write("steps", [step.number, digest(list(model.parameters()))])
                if os.path.exists("stop"):
                    step.stop()
            time.sleep(float(os.environ["PAUSE"]))


def write(name: str, row: list[Any]) -> None:
    # A single write per line: a killed process leaves no partial line.
    fd = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(fd, json.dumps(row).encode() + b"\n")
    os.close(fd)


def accept_faults() -> None:
    """Raise an exception in the main thread, or spoil the sockets in another one, at a signal."""

    def fail(number: int, frame: Any) -> None:
        raise ValueError("injected")

    signal.signal(RAISE, fail)
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)  # at once, also while the main thread is in native code
    for number in (BREAK, CLOSE):
        signal.signal(number, lambda number, frame: None)
    threading.Thread(target=spoil, args=(read,), daemon=True).start()


def spoil(signals: int) -> None:
    """Shut down or close the sockets of this process at a signal."""
    while True:
        number = os.read(signals, 1)[0]
        if number not in (BREAK, CLOSE):
            continue
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # closed in the meantime
                if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                    continue
                if number == CLOSE:
                    # Another file must not get its number: threads of Gloo would write to it.
                    unconnected = socket.socket()
                    os.dup2(unconnected.fileno(), fd, inheritable=False)
                    unconnected.close()
                    continue
                with socket.socket(fileno=os.dup(fd)) as copy:
                    copy.getpeername()  # raises: not connected. Gloo aborts if it cannot listen
                    if copy.family != socket.AF_UNIX:
                        copy.shutdown(socket.SHUT_RDWR)


def rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def start(
    folder: Path, backend: str, words: list[str], **variables: str
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "paceline", "run", f"--nproc-per-node={RANKS}", *words]
    variables["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # a lost store is a warning each second
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [*command, __file__, "--train", backend],
            cwd=folder,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def inject(folder: Path, faults: int, rng: random.Random, is_over: Any) -> Counter[str]:
    """Inject faults until there were enough of them, or the job is over; how many of each kind."""
    found: Counter[str] = Counter()
    at, last = 0, ""  # the step of the fault before, and its kind
    while found.total() < faults and not is_over():
        # One in five comes soon after the one before, and may hit its recovery.
        is_soon = rng.random() < 0.2 and found.total() > 0
        time.sleep(rng.uniform(0, 0.5) if is_soon else rng.uniform(0.5, 2 * INTERVAL_S))
        while not is_soon and not is_over() and newest(folder) < at + 5:
            time.sleep(0.05)
        pids = dict(rows(folder / "ranks"))
        if not pids:
            continue
        # The same failure of a rank in the same step ends a job.
        kind = rng.choice([k for k in KINDS if not (is_soon and k == last)])
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[rng.choice(sorted(pids))], KINDS[kind])
            found[kind] += 1
        at, last = newest(folder), kind
    return found


def newest(folder: Path) -> int:
    """The last step that was done."""
    return max((number for number, _ in rows(folder / "steps")), default=0)


def trial(backend: str, faults: int, rng: random.Random) -> Counter[str]:
    """A job with faults, and the same without."""
    with tempfile.TemporaryDirectory() as name:
        folder, undisturbed = Path(name, "faults"), Path(name, "undisturbed")
        folder.mkdir()
        undisturbed.mkdir()
        words = ["--recover=in-place", "--max-restarts=1000000", "--hang-after=3"]
        job = start(folder, backend, words, UNTIL="1000000", PAUSE="0.02")
        progress = [time.monotonic(), 0]

        def is_over() -> bool:
            if (step := newest(folder)) != progress[1]:
                progress[:] = time.monotonic(), step
            return job.poll() is not None or time.monotonic() - progress[0] > STUCK_S

        found = inject(folder, faults, rng, is_over)
        (folder / "stop").touch()
        while not is_over():
            time.sleep(0.1)
        log = (folder / "log").read_text()
        if job.poll() is None:
            print(
                log[-20000:], f"{backend}: stuck after step {newest(folder)}", sep="\n", flush=True
            )
            job.terminate()
            job.wait()
            found["stuck"] += 1
        elif job.returncode:
            print(log[-20000:], f"{backend}: exit code {job.returncode}", sep="\n", flush=True)
            found["exit code"] += 1
        found["in place"] += len(re.findall("replaced in place|have connected again", log))
        found["restarts"] += log.count("paceline: restarted ranks")
        for why, times in Counter(re.findall(r"no recovery in place: (.*)", log)).most_common():
            print(f"{times} times: {why}", flush=True)
        start(undisturbed, backend, [], UNTIL=str(newest(folder)), PAUSE="0").wait()
        expected = dict(rows(undisturbed / "steps"))
        wrong = [
            number for number, weights in rows(folder / "steps") if weights != expected[number]
        ]
        if wrong:
            print(
                log[-20000:],
                f"{backend}: other weights after step {min(wrong)}",
                sep="\n",
                flush=True,
            )
        found["unequal"] += bool(wrong)
        found["steps"] += newest(folder)
        return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, count in (("faults", 500), ("per-job", 50), ("seed", 1)):
        options.add_argument(f"--{name}", type=int, default=count)
    options.add_argument("--backends", default="shm,gloo")
    options.add_argument("--json", action="store_true", help="print JSON and write nothing")
    options.add_argument("--train", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.train:
        train(args.train)
        return
    counted = ("in place", "restarts", "steps", "stuck", "exit code", "unequal")
    table: list[dict[str, Any]] = []
    for backend in args.backends.split(","):
        total: Counter[str] = Counter()
        rng = random.Random(args.seed)
        while (left := args.faults - sum(total[kind] for kind in KINDS)) > 0:
            total += trial(backend, min(left, args.per_job), rng)
            total["jobs"] += 1
            print(backend, dict(total), flush=True)
        row: dict[str, Any] = {"backend": backend, "jobs": total["jobs"]}
        table.append(row | {name: total[name] for name in (*KINDS, *counted)})
    publish("in_place_faults", table, as_json=args.json, ranks=RANKS, seed=args.seed)


if __name__ == "__main__":
    main()
