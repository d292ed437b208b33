"""`paceline.spawn` from every kind of `__main__`: no child runs it again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment

import paceline

SCRIPT = """
import os, sys, threading
import paceline
import helper

print("script begins")

class Bad(Exception):
    pass

class Value:
    def __init__(self, number):
        self.number = number

def work(job, scale):
    if scale < 0 and job.rank == 1:
        raise Bad("scale", scale)
    return Value(helper.double(job.rank) * scale)

before = dict(vars(sys.modules["__main__"]))
values = paceline.spawn(work, 10, nproc=2)
print([value.number for value in values], type(values[0]) is Value)
try:
    paceline.spawn(work, -1, nproc=2)
except Bad as error:
    print("caught", error.args, "on rank 1" in error.__notes__[0])
results = {}
threads = [
    threading.Thread(target=lambda n=n: results.update({n: len(paceline.spawn(work, n, nproc=1))}))
    for n in (1, 2)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
after = vars(sys.modules["__main__"])
print(results[1], results[2], all(after[name] is before[name] for name in before))
"""
EXPECTED = ["script begins", "[0, 20] True", "caught ('scale', -1) True", "1 1 True"]


SLOW = [pytest.param(k, marks=pytest.mark.slow) for k in ("stdin", "module", "command", "guarded")]


@pytest.mark.parametrize("kind", ["script", *SLOW])
@pytest.mark.ci
def test_spawn_from_any_main(tmp_path: Path, kind: str) -> None:
    script = SCRIPT
    if kind == "guarded":
        head, line, body = SCRIPT.partition("before =")
        body = "\n".join(f"    {row}" for row in (line + body).splitlines())
        script = f"{head}if __name__ == '__main__':\n{body}\n"
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "helper.py").write_text("def double(x):\n    return 2 * x\n")
    words = {"stdin": ["-"], "module": ["-m", "train"], "command": ["-c", script]}
    done = subprocess.run(
        [sys.executable, *words.get(kind, ["train.py"])],
        cwd=tmp_path,
        env=environment(),
        input=script if kind == "stdin" else "",
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.splitlines() == EXPECTED, done
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.ci
def test_openmp_may_have_a_list_of_threads(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import logging, paceline, torch\n"
        "def work(job):\n"
        "    logging.getLogger('paceline').warning('%d threads', torch.get_num_threads())\n"
        "paceline.spawn(work, nproc=2)\n"
    )
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=environment(OMP_NUM_THREADS="3,2"),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert sorted(done.stderr.splitlines()) == [
        "[0] paceline: 3 threads",
        "[1] paceline: 3 threads",
    ]


def test_main_is_itself_again_when_a_start_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    before = dict(vars(main))

    def start(process: object) -> None:
        assert getattr(main, "__file__", None) is None
        raise OSError("no more processes")

    monkeypatch.setattr("multiprocessing.context.ForkServerProcess.start", start)
    with pytest.raises(OSError, match="no more processes"):
        paceline.spawn(len, nproc=1)
    assert vars(main) == before
