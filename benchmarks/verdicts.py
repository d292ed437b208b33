"""Let jobs hang and crash in each known way, and check that the launcher reports the right cause.

    python benchmarks/verdicts.py [--what hangs crashes] [--ranks 2 4] [--only WORD]
    python benchmarks/verdicts.py --what healthy --healthy-min 30

Each kind runs in a script that uses paceline and in one that does not. A report is right if it names the
rank, the operation and the line. Healthy jobs have a slow first step, and one rank that evaluates for 20 s
and saves for 20 s; every second job runs while other processes use all cores. No healthy job may be reported
as a hang. Wrong reports are printed to standard error.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "e2e"))

from hangs import HEALTHY, KINDS, PACELINE, PLAIN, STEPS, expected, script, verdict
from launching import run
from tables import publish

# What rank 1 does after three steps, and parts of the report; `{LINE}` is the line of it.
CRASHES = {
    "raises": ("raise ValueError('bad sample')", ["ValueError: bad sample", "train.py:{LINE}"]),
    "asserts": ("assert world == 0, 'no'", ["AssertionError: no", "train.py:{LINE}"]),
    "imports nothing": ("import nowhere", ["ModuleNotFoundError", "train.py:{LINE}"]),
    "has no memory": ("torch.empty(1 << 50)", ["DefaultCPUAllocator", "train.py:{LINE}"]),
    "exits": ("sys.exit(3)", ["exit code 3", "train.py:{LINE}"]),
    "exits at once": ("os._exit(7)", ["exit code 7", "os._exit()"]),
    "leaves": ("os._exit(0)", ["rank 1 ended with exit code 0 while the others went on"]),
    "is killed": ("os.kill(os.getpid(), 9)", ["killed by SIGKILL", "did not kill it for memory"]),
    "is terminated": ("os.kill(os.getpid(), 15)", ["killed by SIGTERM", "scheduler or a person"]),
    "segfaults": (
        "import ctypes; ctypes.string_at(0)",
        ["killed by SIGSEGV", 'train.py", line {LINE}', "memory that is not its own"],
    ),
    "aborts": ("os.abort()", ["killed by SIGABRT", 'train.py", line {LINE}']),
    "gives another size": (
        "dist.all_reduce(torch.ones(9, 9))",
        ["called last: ", "(f32[9,9])", "collectives are matched by order alone"],
    ),
    "gets a bus error": (
        "os.kill(os.getpid(), signal.SIGBUS)",
        ["killed by SIGBUS", "/dev/shm has"],
    ),
}


def crashes(folder: Path, world: int, ours: bool, only: str) -> Iterator[tuple[str, bool, float]]:
    for name, (line, words) in CRASHES.items():
        if only not in name:
            continue
        head = PACELINE.replace("BACKEND", "gloo") if ours else PLAIN
        text = f"{head}{STEPS}if rank == 1:\n    {line} # HERE\nstep()\n"
        number = next(n for n, t in enumerate(text.splitlines(), 1) if t.endswith("# HERE"))
        text = text.replace("if rank == 1:", "print('at', time.time(), flush=True)\nif rank == 1:")
        done = run(f"--nproc-per-node={world}", text, folder)
        ended = time.time()
        wanted = [word.format(LINE=number + 1) for word in [*words, "rank 1"]]
        wrong = [word for word in wanted if word not in done.err]
        if wrong or done.err.count("Traceback") > 1:
            print(f"crash {name!r}, {world} ranks, {wrong}:\n{done.err}", file=sys.stderr)
        times = [float(at) for at in re.findall(r"at ([\d.]+)", done.out)]
        yield name, not wrong, ended - max(times)


def hangs(folder: Path, world: int, ours: bool, only: str) -> Iterator[tuple[str, bool, float]]:
    for name, kind in KINDS.items():
        if only not in name:
            continue
        text = script(kind, paceline=ours)
        report = verdict(text, folder, world)
        wrong = [word for word in expected(kind, text) if word not in report]
        if wrong or not report.startswith(f"{kind.word}: "):
            print(f"hang {name!r}, {world} ranks, {wrong}:\n{report}", file=sys.stderr)
        seconds = re.findall(r"waited (\d+) s", report)
        yield name, not wrong, float(seconds[0]) if seconds else 99.0


def healthy(folder: Path, world: int, minutes: float, scale: float) -> dict[str, object]:
    """Run healthy jobs for so many minutes, with and without paceline, and count the reports.

    Args:
        scale: Factor for all times in the script and for the threshold of 10 s.
    """
    end = time.monotonic() + minutes * 60
    kinds = [(False, False), (True, True), (True, False), (False, True)]
    ends = []
    while len(ends) < 2 or time.monotonic() < end:
        ours, busy = kinds[len(ends) % len(kinds)]
        head = PACELINE.replace("BACKEND", "gloo") if ours else PLAIN
        burn = [sys.executable, "-c", "while True: pass"]
        others = [subprocess.Popen(burn) for _ in range(2 * busy * (os.cpu_count() or 1))]
        try:
            words = f"--nproc-per-node={world} --hang-after={10 * scale}"
            done = run(words, head + HEALTHY, folder, deadline_s=600, SCALE=str(scale))
        finally:
            for other in others:
                other.kill()
                other.wait()
        ends.append(done)
        if done.code or "hang:" in done.err:
            print(f"healthy, paceline {ours}, busy {busy}:\n{done}", file=sys.stderr)
    lines = [line for done in ends for line in done.err.splitlines()]
    return {
        "what": "healthy",
        "ranks": world,
        "minutes": minutes,
        "jobs": len(ends),
        "ended_well": sum(done.code == 0 for done in ends),
        "alarms": sum(line.startswith("hang:") for line in lines),
        "notices": sum(line.startswith("waiting:") for line in lines),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", nargs="+", default=["hangs", "crashes"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--only", default="")
    parser.add_argument("--healthy-min", type=float, default=30.0)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--json", action="store_true", help="print JSON and write nothing")
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        if "healthy" in args.what:
            rows.append(healthy(Path(folder), args.ranks[0], args.healthy_min, args.scale))
        for what in [what for what in args.what if what != "healthy"]:
            for world in args.ranks:
                for ours in (False, True):
                    side = {"hangs": hangs, "crashes": crashes}[what]
                    found = list(side(Path(folder), world, ours, args.only))
                    seconds = [one[2] for one in found]
                    rows.append(
                        {
                            "what": what,
                            "ranks": world,
                            "paceline": ours,
                            "kinds": len(found),
                            "right": sum(one[1] for one in found),
                            "wrong": [one[0] for one in found if not one[1]],
                            "median_s": statistics.median(seconds),
                            "worst_s": max(seconds),
                        }
                    )
    publish("healthy" if args.what == ["healthy"] else "verdicts", rows, as_json=args.json)


if __name__ == "__main__":
    main()
