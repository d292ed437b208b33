"""The ranks of `paceline verify` are forks of its process, and behave as new interpreters do."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

SCRIPT = """
import atexit, json, multiprocessing, os, random, signal, subprocess, sys
import numpy, torch

rank = int(os.environ["RANK"])
atexit.register(lambda: print("atexit", rank))
facts = {
    "rank": rank,
    "random": random.random(),
    "numpy": float(numpy.random.rand()),
    "torch": float(torch.rand(())),
    "argv": sys.argv[1:],
    "command": sys.orig_argv[1:],
    "name": __name__,
    "main": sys.modules["__main__"].__file__ == os.path.abspath(__file__),
    "first": multiprocessing.parent_process() is None,
    "stdin": sys.stdin.read(),
}
sys.stdout.write(json.dumps(facts) + "\\n")  # in one piece: both ranks write to one file
with open(f"new-{rank}", "w") as file:
    file.write(str(subprocess.Popen(["sleep", "100"]).pid))
os.rename(f"new-{rank}", f"child-{rank}")
if rank == 1:
    while not os.path.exists("child-0"):
        pass
    sys.exit(3)
signal.pause()
"""
RUN = """
import sys
from pathlib import Path
from paceline.audit.run_plan import RunPlan
from paceline.verify.forked_ranks import ForkedRanks, preload

folder = Path.cwd()
preload()
plan = RunPlan(folder, "ordinary", 2, 3)
ranks = ForkedRanks(2, ["script.py", "--lr", "1"], plan.to_environment(), folder / "output.txt")
assert ranks.wait(60)
print(ranks.returncode)
"""


@pytest.mark.ci
def test_two_ranks_of_which_one_fails(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "3\n"  # and not twice: the ranks share no buffered output
    lines = (tmp_path / "output.txt").read_text().splitlines()
    facts = {each["rank"]: each for each in (json.loads(x) for x in lines if x.startswith("{"))}
    assert all(facts[0][name] != facts[1][name] for name in ("random", "numpy", "torch"))
    assert [each["argv"] for each in facts.values()] == [["--lr", "1"]] * 2
    assert facts[0]["command"] == ["script.py", "--lr", "1"]
    assert {each["name"] for each in facts.values()} == {"__main__"}
    assert all(each["main"] and each["first"] and not each["stdin"] for each in facts.values())
    assert "atexit 1" in lines  # rank 0 waits forever, and was ended
    for rank in range(2):
        pid = int((tmp_path / f"child-{rank}").read_text())
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    events = [json.loads(line) for line in (tmp_path / "rank1.jsonl").read_text().splitlines()]
    kinds = [each["event"] for each in events]
    assert kinds[:3] == ["RankStarted", "ExitCalled", "Failed"]
    assert kinds[-1] == "RankEnded"


@pytest.mark.ci
def test_killed_with_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import signal\nsignal.pause()\n")
    kill = "print(*ranks.pids, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    source = "import os, signal" + RUN[: RUN.index("assert")] + kill
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    ranks = [psutil.Process(int(pid)) for pid in done.stdout.split() if psutil.pid_exists(int(pid))]
    _, left = psutil.wait_procs(ranks, timeout=30)
    assert not left
