"""Let jobs hang and crash in every way we know, and look whether the launcher says the truth.

    python benchmarks/verdicts.py [--what hangs crashes] [--ranks 2 4] [--only WORD]

Each kind runs in a script with paceline and in one without. A verdict is right if it names the rank, the
operation and the line. Prints counts as JSON, and what was wrong to standard error.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "e2e"))

from hangs import KINDS, PACELINE, PLAIN, STEPS, expected, script, verdict
from launching import run

# What rank 1 does after three steps, and words of the verdict; `{LINE}` is where it does it.
CRASHES = {
    "raises": ("raise ValueError('bad sample')", ["ValueError: bad sample", "train.py:{LINE}"]),
    "asserts": ("assert world == 0, 'no'", ["AssertionError: no", "train.py:{LINE}"]),
    "imports nothing": ("import nowhere", ["ModuleNotFoundError", "train.py:{LINE}"]),
    "has no memory": ("torch.empty(1 << 50)", ["DefaultCPUAllocator", "train.py:{LINE}"]),
    "exits": ("sys.exit(3)", ["exit code 3", "train.py:{LINE}"]),
    "exits at once": ("os._exit(7)", ["exit code 7", "os._exit()"]),
    "leaves": ("os._exit(0)", ["rank 1 ended with exit code 0 while the others went on"]),
    "is killed": ("os.kill(os.getpid(), 9)", ["killed by SIGKILL", "whose count stands"]),
    "is terminated": ("os.kill(os.getpid(), 15)", ["killed by SIGTERM", "scheduler or a person"]),
    "segfaults": (
        "import ctypes; ctypes.string_at(0)",
        ["killed by SIGSEGV", 'train.py", line {LINE}', "memory that is not its own"],
    ),
    "aborts": ("os.abort()", ["killed by SIGABRT", 'train.py", line {LINE}']),
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
        said = verdict(text, folder, world)
        wrong = [word for word in expected(kind, text, world) if word not in said]
        if wrong or not said.startswith(f"{kind.word}: "):
            print(f"hang {name!r}, {world} ranks, {wrong}:\n{said}", file=sys.stderr)
        seconds = re.findall(r"since (\d+) s", said)
        yield name, not wrong, float(seconds[0]) if seconds else 99.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", nargs="+", default=["hangs", "crashes"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for what in args.what:
            for world in args.ranks:
                for ours in (False, True):
                    side = {"hangs": hangs, "crashes": crashes}[what]
                    found = list(side(Path(folder), world, ours, args.only))
                    seconds = [one[2] for one in found]
                    row = {
                        "what": what,
                        "ranks": world,
                        "paceline": ours,
                        "kinds": len(found),
                        "right": sum(one[1] for one in found),
                        "wrong": [one[0] for one in found if not one[1]],
                        "median_s": round(statistics.median(seconds), 2),
                        "worst_s": round(max(seconds), 2),
                    }
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
