"""Kill a process while it saves a checkpoint, and check that no checkpoint is lost or damaged.

    python benchmarks/faults.py [--random 900] [--calls 200] [--ranks 20] [--seed 1]

A child process saves steps 1, 2, 3, ... with `keep=2` and reports each saved step, until SIGKILL ends it.
Then every committed checkpoint must be complete and equal to what was saved, and the last reported step must
exist.

    random   kill after a random time
    calls    kill at the N-th call of each system call of a save; needs strace, otherwise skipped
    ranks    one of 3 ranks kills itself after a random time

The table shows how often each outcome occurred.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tables import publish

import paceline
from paceline.checkpoint.reader import read
from paceline.checkpoint.store import committed, open_store, read_manifest
from paceline.testing import run_failing_ranks

# Calls that write come first, because a small --calls covers only the beginning of the list.
CALLS = ("openat", "write", "fsync", "rename", "mkdir", "close", "unlink", "unlinkat", "rmdir")
CALLS += ("newfstatat", "getdents64", "lseek", "read")
KEEP = 2


def content(step: int) -> dict[str, Any]:
    return {"step": step, "a": torch.full((20_000,), float(step)), "b": torch.full((7, 300), step)}


def save_all(job: Any, folder: str, first: int, report: Any, until: int = 10**6) -> None:
    checkpoints = paceline.Checkpoints(folder, keep=KEEP)
    for step in range(first, until):
        checkpoints.save(job, step, content(step))
        report(step)


def child(folder: str, first: int, until: int, *, stop_at: int = 0) -> tuple[int, int]:
    """Fork a process that saves. Return its pid and a pipe from which to read the saved steps."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return pid, ours
    try:

        def report(step: int) -> None:
            os.write(theirs, b"%d\n" % step)
            if step == stop_at:
                os.kill(os.getpid(), signal.SIGSTOP)

        with paceline.join() as job:
            save_all(job, folder, first, report, until)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(3)


def last_reported(pipe: int) -> int:
    with os.fdopen(pipe) as file:
        return max((int(line) for line in file.read().split()), default=0)


def outcome(folder: str, reported: int, started: int) -> str:
    """The state of the folder after a kill: "whole" or a description of the damage."""
    store = open_store(folder)
    steps = committed(store)
    for step in steps:
        try:
            found, _ = read(store, read_manifest(store, step))
        except Exception as error:
            return f"torn: {error}"
        want = content(step)
        if not all(torch.equal(torch.as_tensor(found[k]), torch.as_tensor(want[k])) for k in want):
            return "other content"
    newest = max(reported, started)
    if newest and newest not in steps and not (steps and steps[-1] > newest):
        return f"lost: step {newest} was saved, but the folder has {steps}"
    if len(steps) < min(KEEP, newest):
        return f"lost: older steps; the folder has {steps}"
    return "whole"


def random_kills(count: int, rng: random.Random) -> Counter[str]:
    """Kill at random times. All children use the same folder, like restarts of one job."""
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        newest = 0
        for _ in range(count):
            pid, pipe = child(folder, newest + 1, 10**6)
            os.read(pipe, 1)  # the first step is saved; the child saves continuously from here on
            time.sleep(rng.uniform(0, 0.05))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            found[outcome(folder, last_reported(pipe), newest)] += 1
            newest = max([newest, *committed(open_store(folder))])
    return found


def call_kills(count: int, rng: random.Random) -> Counter[str]:
    """Kill at the entry of system calls of the third save, which also deletes the first checkpoint."""
    found: Counter[str] = Counter()
    if shutil.which("strace") is None:
        return found
    places = [(call, n) for n in range(1, 40) for call in CALLS]
    beyond: dict[str, int] = {}
    for call, n in places:
        if sum(found.values()) >= count:
            break
        if n >= beyond.get(call, 10**6):
            continue
        with tempfile.TemporaryDirectory() as folder:
            pid, pipe = child(folder, 1, 4, stop_at=2)
            os.waitpid(pid, os.WUNTRACED)
            words = [
                "strace",
                "-f",
                "-qq",
                "-o",
                "/dev/null",
                "-p",
                str(pid),
                "-e",
                f"trace={call}",
            ]
            tracer = subprocess.Popen([*words, "-e", f"inject={call}:signal=KILL:when={n}"])
            while "TracerPid:\t0" in Path(f"/proc/{pid}/status").read_text():
                if tracer.poll() is not None:
                    raise RuntimeError("strace cannot attach")
                time.sleep(0.002)
            os.kill(pid, signal.SIGCONT)
            status = os.waitpid(pid, 0)[1]
            tracer.wait()
            if not os.WIFSIGNALED(status):
                beyond[call] = n
                os.close(pipe)
                continue
            found[outcome(folder, last_reported(pipe), 2)] += 1
    found["system calls"] = len(CALLS)
    return found


def rank_saves(job: Any, folder: str, first: int, victim: int, delay_s: float) -> None:
    def report(step: int) -> None:
        if job.rank == 0:
            Path(folder, "reported").write_text(str(step))
        if step == first and job.rank == victim:
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    save_all(job, f"{folder}/c", first, report)


def rank_kills(count: int, rng: random.Random) -> Counter[str]:
    """Kill one of 3 ranks at random times. The other ranks must end with an error."""
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        newest = 0
        for _ in range(count):
            victim, delay_s = rng.randrange(3), rng.uniform(0, 0.1)
            run_failing_ranks(rank_saves, folder, newest + 1, victim, delay_s, nproc=3)
            reported = int(Path(folder, "reported").read_text() or 0)
            found[outcome(f"{folder}/c", reported, newest)] += 1
            newest = max([newest, *committed(open_store(f"{folder}/c"))])
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, count in (("random", 900), ("calls", 200), ("ranks", 20)):
        options.add_argument(f"--{name}", type=int, default=count)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--json", action="store_true", help="print JSON and write nothing")
    args = options.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(args.seed)
    # The first save imports DCP. Do it once here, so that the children inherit it.
    with tempfile.TemporaryDirectory() as folder, paceline.join() as job:
        save_all(job, folder, 1, lambda step: None, 2)
    kinds = {"random": random_kills, "calls": call_kills, "ranks": rank_kills}
    results = {name: kind(getattr(args, name), rng) for name, kind in kinds.items()}
    rows = [{"kills": name, **counts} for name, counts in results.items()]
    publish("faults", rows, as_json=args.json)


if __name__ == "__main__":
    main()
