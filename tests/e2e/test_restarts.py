"""The end of restarts: a repeated error, a lost host; `benchmarks/restarts.py` has more kinds of failures."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from launching import finish, node_words, rows_of, run, start, wait_served, wait_until
from scripts import training_script

WAITS = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
open(f"began-{dist.get_rank()}", "w").close()
while True:
    dist.all_reduce(torch.ones(10))
    time.sleep(0.01)
"""

RAISES = training_script(
    before_update="""
if step.number == 3 and job.rank == 1:
    raise OSError("bad sample")
if step.number == 3:
    time.sleep(60)
""",
    epochs=1,
)


@pytest.mark.ci
def test_the_same_exception_in_the_same_step_ends_the_job(tmp_path: Path) -> None:
    done = run("--nproc-per-node=2 --max-restarts=5", RAISES, tmp_path)
    assert done.code == 1, done
    assert done.err.count("begins") == 1
    assert "The same happened in step 3 before the restart" in done.err
    folder = Path(done.err.splitlines()[-1].rpartition(" are in ")[2])
    state = json.loads((folder / "rank0-state.json").read_text())
    assert state["stacks and collectives"]["threads"]


@pytest.mark.ci
def test_the_loss_of_the_rendezvous_host_ends_the_job_with_69(
    tmp_path: Path, free_port: int
) -> None:
    (tmp_path / "train.py").write_text(WAITS)
    words = node_words(free_port, "--max-restarts=3", "train.py")
    host = start(words, tmp_path)
    assert host.stderr is not None
    assert "waiting for 2 nodes" in host.stderr.readline()
    # It prints this before it serves. Only a node that starts later is certainly not the host.
    wait_served(free_port)
    other = start(words, tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("began-*"))) == 2, other)
    children = Path(f"/proc/{host.pid}/task/{host.pid}/children").read_text().split()
    for pid in [host.pid, *map(int, children)]:
        os.kill(pid, signal.SIGKILL)
    host.communicate()
    end = finish(other)
    assert end.code == 69, end
    assert "the rendezvous was lost" in end.err
    assert "resumes from its last checkpoint" in end.err


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [3, 4])
def test_no_fault_loses_anything(ranks: int) -> None:
    kinds = ["kill", "raise", "exit", "stop", *["preempt"] * (ranks == 3)]
    words = ["--count=1", f"--ranks={ranks}", f"--kinds={','.join(kinds)}"]
    found = rows_of("restarts", words, 500)
    assert [(row["kind"], row["lost"]) for row in found] == [(kind, []) for kind in kinds]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_lost_node_and_its_return_give_the_same_bits() -> None:
    found = rows_of("restarts", ["--count=1", "--kinds=node,silent"], 500)
    assert [kind["lost"] for kind in found] == [[]] * 2
