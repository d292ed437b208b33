"""`paceline profile`: one trace of all ranks, and the costliest operations."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from launching import finish, start
from scripts import training_script

from paceline.profile.merge import RankProfile, overlap, summary

SCRIPT = training_script(
    before_update="torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # the costliest operation",
    epochs=3,
)


@pytest.mark.ci
def test_a_trace_of_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["profile", "--skip=4", "--steps=20", "--nproc-per-node=2", "train.py"]
    done = finish(start(words, tmp_path))
    assert done.code == 0, done.err
    assert "20 steps on 2 ranks" in done.out
    assert "profiler_start" not in done.out + done.err, "torch's profiler logs its own progress"
    costliest = re.findall(r"^ +[\d.]+ +[\d.]+  (\S+)$", done.out, re.MULTILINE)
    assert costliest[0] == "aten::mm"
    hidden = re.findall(r"^ +[01] +[\d.]+ +[\d.]+ +[\d.]+ +(\d+) %$", done.out, re.MULTILINE)
    assert len(hidden) == 2
    trace = json.loads(gzip.decompress((tmp_path / "profile.json.gz").read_bytes()))
    events = trace["traceEvents"]
    names = [e["args"]["name"] for e in events if e.get("name") == "process_name"]
    assert names == ["rank 0", "rank 1"]
    assert min(e["ts"] for e in events if "ts" in e and e["ph"] == "X") == 0

    for rank in range(2):
        own = [e["name"] for e in events if e.get("ph") == "X" and e["pid"] == rank]
        assert sum(name.startswith(("gloo:all_reduce", "shm:")) for name in own) >= 20
        assert any(name.startswith("autograd::engine") for name in own)
    assert not list(tmp_path.glob("paceline-profile-*"))


THREE_STEPS = """
import torch

weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(3):
    weight.sum().backward()
    optimizer.step()
"""


@pytest.mark.ci
def test_too_few_steps_and_wrong_options_are_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(THREE_STEPS)
    for skip in (3, 4):  # the third step is skipped, and no other follows
        words = ["profile", f"--skip={skip}", "--nproc-per-node=1", "train.py"]
        done = finish(start(words, tmp_path))
        assert done.code == 65, done.err
        assert "no step was recorded" in done.err
        assert "choose a smaller --skip" in done.err
    assert finish(start(["profile", "--steps=0", "train.py"], tmp_path)).code == 2
    assert finish(start(["profile"], tmp_path)).code == 2


def _event(name: str, begin: float, end: float, kind: str = "cpu_op") -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "ts": begin,
        "dur": end - begin,
        "pid": 1,
        "tid": 1,
    }


def test_half_of_the_communication_is_hidden() -> None:
    work = [
        _event("aten::mm", 40, 80),
        _event("gloo:all_reduce", 60, 100, "user_annotation"),
    ]
    profile = RankProfile(rank=0, steps=1, events=work, names=[], totals={})
    _, computing_s, communication_s, hidden = overlap(profile)
    assert computing_s == pytest.approx(40e-6)
    assert communication_s == pytest.approx(40e-6)
    assert hidden == pytest.approx(0.5)


def test_operations_are_sorted_by_their_time_on_the_gpu_if_there_is_one() -> None:
    totals = {"aten::mm": (1e-3, 8e-3, 2), "aten::empty": (5e-3, 0.0, 4)}
    profile = RankProfile(
        rank=0, steps=2, events=[_event("aten::mm", 40, 80)], names=[], totals=totals
    )
    lines = summary([profile])
    assert lines[1].split() == ["ms", "of", "a", "step", "on", "the", "host", "calls", "operation"]
    assert [line.split() for line in lines[2:4]] == [
        ["4.000", "0.500", "1.0", "aten::mm"],
        ["0.000", "2.500", "2.0", "aten::empty"],
    ]
