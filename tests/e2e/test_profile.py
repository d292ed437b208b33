"""`paceline profile`: one trace of all ranks, the costliest operations, and what the step clock says too."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from launching import finish, start

from paceline.clock.record import read_record
from paceline.profile.merge import RankProfile, overlap, summary

SCRIPT = """
import torch, paceline
from paceline.clock.step_clock import clock

# Each phase has one costly operation, so that its time is that of what the profiler has a name for.
class Costly(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(1000) / 1000)

    def forward(self, x):
        return (x @ self.weight @ self.weight).cosh()

class CostlySGD(torch.optim.SGD):
    def step(self, closure=None):
        weight = self.param_groups[0]["params"][0].detach()
        weight @ weight
        return super().step(closure)

ROWS = torch.randn(50, 1000, generator=torch.Generator().manual_seed(0))  # on all ranks alike

class Same(torch.utils.data.Dataset):
    def __len__(self):
        return 1024

    def __getitem__(self, index):
        return ROWS

def collate(samples):
    return torch.stack(samples).sort().values

with paceline.join(backend="gloo") as job:
    model = paceline.ddp(job, Costly(), bucket_mb=0.5)
    batches = paceline.Batches(job, Same(), global_batch=16, collate=collate)
    training = paceline.Training(job, model, CostlySGD(model.parameters(), 1e-6), batches)
    training.report("run")
    for step in training.steps(until=24):
        for x in step:
            step.backward(model(x).sum(), count=len(x), reduction="sum")
        step.update()
        if step.number == 4:
            clock.take()  # the clock counts from here on, as the profiler does
"""


# By phase of the clock: what torch's profiler calls it.
PROFILED = {
    "data": ("aten::stack", "aten::sort"),
    "forward": ("DistributedDataParallel.forward",),
    "backward": ("autograd::engine",),
    "optimizer": ("Optimizer.step#CostlySGD.step",),
}


def _bounds_s(events: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """The least and the most seconds that each phase may have taken.

    At least its own events; at most all from the end of the phase before to the begin of the next one.
    A rank that waits for a core between two events may do so in either phase.
    """
    spans: list[tuple[str, float, float]] = []  # phase, begin and end of its events in one step
    least = dict.fromkeys(PROFILED, 0.0)
    end = 0.0
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        phases = [phase for phase, names in PROFILED.items() if event["name"].startswith(names)]
        if not phases or event["ts"] < end:
            continue  # inside another one
        (phase,), begin, end = phases, event["ts"], event["ts"] + event["dur"]
        least[phase] += event["dur"]
        if spans and spans[-1][0] == phase:
            begin = spans.pop()[1]
        spans.append((phase, begin, end))
    ends = [min(e["ts"] for e in events), *(end for _, _, end in spans)]
    begins = [*(begin for _, begin, _ in spans[1:]), max(e["ts"] + e["dur"] for e in events)]
    most = dict.fromkeys(PROFILED, 0.0)
    for (phase, _, _), before, after in zip(spans, ends, begins, strict=False):
        most[phase] += after - before
    return {phase: (least[phase] / 1e6, most[phase] / 1e6) for phase in PROFILED}


@pytest.mark.ci
def test_a_trace_of_two_ranks_agrees_with_the_clock(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    # One step more than there are: the trace is written after the training, not in the time of its last step.
    words = ["profile", "--skip=4", "--steps=21", "--nproc-per-node=2", "train.py"]
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

    windows = read_record(tmp_path / "run").windows
    for rank in range(2):
        own = [e for e in events if e.get("ph") == "X" and e["pid"] == rank]
        assert sum(e["name"] == "gloo:all_reduce" for e in own) >= 20
        for phase, (least_s, most_s) in _bounds_s(own).items():
            clock_s = sum(w.spent_s[phase][rank] for w in windows if w.step > 4)
            assert 0.95 * least_s < clock_s < 1.05 * most_s, phase
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
