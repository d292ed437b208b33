"""Planted bottlenecks: the first advice names them, and its cure gains at most what it said.

The delays are sleeps, and the rate of a link between two hosts, so the gain depends little on how busy the
machine is.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hosts import hosts, missing_tool
from launching import finish, start

from paceline.clock.judge import Finding, judge
from paceline.report.run import load

SCRIPT = """
import json, sys, time
import torch
import paceline

folder, kind, changes, seconds = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), float(sys.argv[4])
torch.set_num_threads(1)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 16

    def __getitem__(self, index):
        if kind == "data":
            time.sleep(0.003)
        return torch.ones(64)


class Net(torch.nn.Sequential):
    def forward(self, x):
        slow = kind == "straggler" and job.rank == 1
        time.sleep((0.005 if slow else 0.002) * len(x))
        return super().forward(x)


with paceline.join(timeout_s=60) as job:
    layers = [layer for _ in range(16) for layer in (torch.nn.Linear(64, 64), torch.nn.ReLU())]
    if kind == "communication":
        layers = [torch.nn.Linear(64, 2048), torch.nn.Linear(2048, 64)]
    model = paceline.ddp(job, Net(*layers), **changes.get("ddp", {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    sizes = {"global_batch": 32, "micro_batch": 16} | changes.get("Batches", {})
    batches = paceline.Batches(job, Rows(), **sizes)
    training = paceline.Training(job, model, optimizer, batches)
    training.report(folder)
    began = time.perf_counter()
    for step in training.steps():
        for x in step:
            step.backward(model(x).sum(), count=len(x), reduction="sum")
        step.update()
        if time.perf_counter() > began + seconds:
            step.stop()
"""
SECONDS = 5.5  # a warm-up and at least three windows of about a second

NARROW = "tbf rate 200mbit burst 4kb latency 5s"  # a network card of 200 Mbit/s

Run = Callable[[str, dict[str, Any]], Path]
_reason = missing_tool("tc")
needs_tc = pytest.mark.skipif(bool(_reason), reason=_reason or "-")


@contextmanager
def _one_host(tmp_path: Path) -> Iterator[Run]:
    def run(kind: str, changes: dict[str, Any]) -> Path:
        folder, words = _prepare(tmp_path, kind, changes)
        done = finish(start(["run", "--nproc-per-node=2", *words], tmp_path))
        assert done.code == 0, done.err
        (folder / "err").write_text(done.err)
        return folder

    yield run


@contextmanager
def _two_hosts(tmp_path: Path) -> Iterator[Run]:
    """Two hosts of one rank each, with a narrow link."""
    with hosts(2) as made:
        for number in range(2):
            made.call(number, "tc", "qdisc", "add", "dev", "eth0", "root", *NARROW.split())

        def run(kind: str, changes: dict[str, Any]) -> Path:
            folder, words = _prepare(tmp_path, kind, changes)
            more = ["--nnodes=2", "--nproc-per-node=1", f"--host={made.address(0)}"]
            ends = made.run([*more, *words], tmp_path)
            assert [end.code for end in ends] == [0, 0], ends
            (folder / "err").write_text("".join(end.err for end in ends))
            return folder

        yield run


def _prepare(tmp_path: Path, kind: str, changes: dict[str, Any]) -> tuple[Path, list[str]]:
    (tmp_path / "train.py").write_text(SCRIPT)
    folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    return folder, ["train.py", str(folder), kind, json.dumps(changes), str(SECONDS)]


def _rate(folder: Path) -> float:
    """Samples per second, without the warm-up."""
    windows = load(str(folder)).record.windows[1:]
    return median(w.samples / (sum(w.wall_s) / w.num_ranks) for w in windows)


def _judge(folder: Path) -> list[Finding]:
    found = judge(load(str(folder)).record)
    assert found is not None
    return found


def _check(run: Run, kind: str, cure: dict[str, Any]) -> None:
    """The advice of the run names the bottleneck; with the cure it has less of it."""
    folder = run(kind, {})
    first = _judge(folder)[0]
    assert first.kind == kind
    assert f"paceline: advice: {first}.\n" in (folder / "err").read_text()
    cured = run("" if kind == "straggler" else kind, cure)
    gain = _rate(cured) / _rate(folder)
    assert 1 + (first.gain - 1) / 4 < gain < 1.2 * first.gain, first


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["straggler", "data"])
def test_a_bottleneck_in_the_program(tmp_path: Path, kind: str) -> None:
    with _one_host(tmp_path) as run:
        _check(run, kind, {"Batches": {"workers": 2}} if kind == "data" else {})


@pytest.mark.slow
@needs_tc
def test_a_bottleneck_in_the_network(tmp_path: Path) -> None:
    with _two_hosts(tmp_path) as run:
        _check(run, "communication", {"ddp": {"compress": "bf16"}})


@pytest.mark.slow
def test_a_healthy_run_on_a_busy_host_gets_no_advice(tmp_path: Path) -> None:
    """Ranks wait for cores, and so for each other in turn: that is no communication."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        with _one_host(tmp_path) as run:
            folder = run("", {})
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert _judge(folder) == []
