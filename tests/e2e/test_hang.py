"""A hang is explained: which rank, in what, at which line of the script, and within seconds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hangs import ALONE, KINDS, OTHERS_IN, alone_script, expected, extra_script, script, verdict
from launching import rows_of, run

IN_MAKE_TEST = ("sleeps", "raised an error, and waits for ranks")


def _marks(name: str, ours: bool) -> list[pytest.MarkDecorator]:
    if name in IN_MAKE_TEST and not ours:
        return []
    return [pytest.mark.slow if KINDS[name].slow or (ours and name != "sleeps") else pytest.mark.ci]


# Each kind once without and once with paceline; `benchmarks/verdicts.py` runs all numbers of ranks.
CASES = [
    pytest.param(name, world, ours, marks=_marks(name, ours))
    for name in KINDS
    for world, ours in ((2, False), (3, True))
    if not (ours and KINDS[name].once)
]


@pytest.mark.parametrize(("name", "world", "ours"), CASES)
def test_a_hang_is_explained(tmp_path: Path, name: str, world: int, ours: bool) -> None:
    kind = KINDS[name]
    text = script(kind, paceline=ours)
    said = verdict(text, tmp_path, world)
    assert said.startswith(f"{kind.word}: "), said
    for words in expected(kind, text):
        assert words in said, f"{words!r} is not in:\n{said}"
    assert len(said.splitlines()) <= 10
    assert int(re.findall(r"waited (\d+) s", said)[0]) <= 5


ALL_REDUCE = "dist.all_reduce(torch.ones(5))"


@pytest.mark.parametrize(
    ("place", "call", "world"),
    [
        pytest.param(place, call, world, marks=pytest.mark.ci if in_ci else pytest.mark.slow)
        for place in OTHERS_IN
        for call, world, in_ci in (
            (ALL_REDUCE, 2, place == "evaluate"),
            ("dist.barrier()", 3, False),
        )
    ],
)
@pytest.mark.parametrize("backend", ["gloo", pytest.param("shm", marks=pytest.mark.slow)])
def test_an_extra_call_of_one_rank_is_named(
    tmp_path: Path, place: str, call: str, world: int, backend: str
) -> None:
    text, line = extra_script(place, call, backend)
    said = verdict(text, tmp_path, world)
    if not said.startswith("hang: "):
        # shm refuses an extra call that meets another one, and Gloo one that meets a larger tensor.
        assert place in ("backward", "update", "barrier"), said
        assert "paceline: rank" in said, said
        return
    name = call[len("dist.") : call.index("(")]
    assert OTHERS_IN[place] in said, said
    assert "why:  rank 0 makes a call that the others do not make" in said, said
    if not OTHERS_IN[place].startswith(name):  # else it ends, and a later one does not
        assert f": {name} at train.py:{line}, or" in said, said


PIPELINE = """
import queue
import torch, paceline
from torch import nn
job = paceline.join(mesh=paceline.Mesh(pp=2), device="cpu", timeout_s=600)
class Stuck(nn.Linear):
    calls = 0
    def forward(self, x):
        Stuck.calls += 1
        if Stuck.calls > 6:
            queue.Queue().get()  # STUCK
        return super().forward(x)
model = paceline.pipeline(job, nn.Sequential(nn.Linear(4, 4), Stuck(4, 1)))
batches = paceline.Batches(job, torch.ones(8, 4), global_batch=8, micro_batch=2)
training = paceline.Training(job, model, torch.optim.SGD(model.parameters(), lr=0.1), batches)
for step in training.steps(until=9):
    step.run(lambda x: model(x).mean())  # WAITS
    step.update()
"""


@pytest.mark.ci
def test_a_hang_in_a_pipeline_names_the_stages(tmp_path: Path) -> None:
    said = verdict(PIPELINE, tmp_path, 2)
    lines = PIPELINE.splitlines()
    stuck, waits = (next(i for i, x in enumerate(lines, 1) if w in x) for w in ("STUCK", "WAITS"))
    first = r"rank 0 \(host .*, stage 0\) has waited \d+ s in step.run at train.py:"
    assert re.search(f"{first}{waits}", said), said
    assert re.search(rf"rank 1 \(host .*, stage 1\): .*train.py:{stuck}", said), said


HEALTHY = """
import os, socketserver, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(200, 200) @ torch.ones(200, 200)
compute(2.2)  # the first step is slow on all ranks
for epoch in range(2):
    dist.all_reduce(torch.ones(3))
    if dist.get_rank() == 0:
        compute(3)
    dist.barrier()
if os.fork() == 0:
    raise SystemExit  # a child ends as an interpreter does
assert os.wait()[1] == 0
with socketserver.TCPServer(("127.0.0.1", 0), None) as server:
    threading.Timer(4, server.shutdown).start()
    server.serve_forever()  # idle, as a server is without requests
print("done")
"""


@pytest.mark.ci
def test_work_is_no_hang(tmp_path: Path) -> None:
    done = run("--nproc-per-node=2 --hang-after=2", HEALTHY, tmp_path)
    assert (done.code, done.out.count("done")) == (0, 2), done.err
    assert "hang:" not in done.err
    assert done.err.count("waiting: rank 1 (") == 1  # said once, though it comes in each epoch
    assert "compute() at train.py:8" in done.err


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.ci if name in ("is debugged", "receives") else pytest.mark.slow,
        )
        for name in ALONE
    ],
)
def test_a_rank_in_its_own_code_is_no_hang(name: str, tmp_path: Path) -> None:
    """It does something alone for 6 s, and the job goes on to its end."""
    words = "--nproc-per-node=2 --hang-after=2 --on-hang=end"
    done = run(words, alone_script(name, 6), tmp_path)
    assert (done.code, done.out.count("done")) == (0, 2), done.err
    assert "hang:" not in done.err
    assert re.search(r"waiting: rank 0 .* has waited \d+ s in .*\n +rank 1 ", done.err), done.err


@pytest.mark.slow
def test_healthy_jobs_raise_no_alarm() -> None:
    # Of 20 s of work alone and a threshold of 10 s, a tenth: the benchmark does the whole.
    words = ["--what", "healthy", "--ranks", "2", "--healthy-min", "0", "--scale", "0.1"]
    found = rows_of("verdicts", words, 110)[0]
    assert (found["jobs"], found["ended_well"], found["alarms"]) == (2, 2, 0), found
    assert found["notices"] >= 1  # it was looked at


HANGS = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    dist.recv(torch.ones(1), src=0)
dist.barrier()
"""


@pytest.mark.ci
def test_a_hang_may_end_the_ranks_and_uses_up_a_restart(tmp_path: Path) -> None:
    words = "--nproc-per-node=2 --hang-after=2 --on-hang=end --max-restarts=1"
    done = run(words, HANGS, tmp_path)
    assert done.code == 1
    assert "hang: rank 0" in done.err
    how = "blocked the other ranks, as reported above"
    assert re.search(rf"paceline: rank 1 failed: {how} .*; restart 1 of 1 begins", done.err)
    assert f"paceline: rank 1 of 2 failed: {how}" in done.err
    assert "SIGTERM" not in done.err


CHANGED_TORCH = """
import os, sys, time
import torch, torch.distributed as dist
def counts():
    raise KeyError("last_enqueued_collective")
sys.modules["paceline.watch.probe"].counts = counts
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    time.sleep(6)
dist.barrier()
print("done")
"""


@pytest.mark.ci
def test_counts_of_another_torch_switch_the_detection_off(tmp_path: Path) -> None:
    done = run("--nproc-per-node=2 --hang-after=2", CHANGED_TORCH, tmp_path)
    assert (done.code, done.out.count("done")) == (0, 2), done.err
    off = "paceline: the detection of hangs is off: RuntimeError"
    (line,) = [line for line in done.err.splitlines() if line.startswith(off)]
    assert "last_enqueued_collective" in line
    assert "hang:" not in done.err
