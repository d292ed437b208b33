"""The clock finds planted delays in each phase of a step, on every rank, and its phases add up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import small_gpt
import torch
from small_trainings import backwards, make_data, make_training, small_training, train
from torch import nn

import paceline
from paceline.clock.step_clock import PHASES, StepClock
from paceline.job.preemption import Preempted
from paceline.report.run import load
from paceline.testing import InjectedFault, run_failing_ranks, run_ranks

STEPS = 12
PLANTED = {"data": 0.010, "forward": 0.008, "backward": 0.012, "optimizer": 0.006, "other": 0.004}
# Of the last rank, in its loop body; more than a rank waits for a core under load. The others wait for it.
LATE_S = 0.060


class Slow(nn.Module):
    """A layer whose forward and backward take longer, and that has `width`**2 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 3)
        self.middle = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(PLANTED["forward"])
        hidden = self.first(x)
        hidden.register_hook(lambda _: time.sleep(PLANTED["backward"]))  # type: ignore[no-untyped-call]
        return self.last(self.middle(hidden))


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        time.sleep(PLANTED["optimizer"])
        return super().step(closure)


def _collate(samples: list[Any]) -> Any:
    time.sleep(PLANTED["data"])
    return torch.utils.data.default_collate(samples)


def _train(job: Any, folder: str, wrap: str) -> dict[str, Any]:
    model = Slow(600)
    wrapped = (
        paceline.fsdp(job, model, blocks="middle") if wrap == "fsdp" else paceline.ddp(job, model)
    )
    optimizer = SlowSGD(wrapped.parameters(), lr=0.01)
    batches = paceline.Batches(job, make_data(24), global_batch=12, collate=_collate)
    training = paceline.Training(job, wrapped, optimizer, batches)
    training.report(folder)
    loss_fn = nn.CrossEntropyLoss(reduction="sum")
    times: dict[str, float] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("start", "take"):
            patch.setattr(StepClock, name, _stamped(getattr(StepClock, name), times))
        for step in training.steps(epochs=STEPS // 2):
            for x, y in step:
                step.backward(loss_fn(wrapped(x), y), count=len(x), reduction="sum")
            step.update()
            time.sleep(PLANTED["other"])
            if job.rank == job.world_size - 1:
                time.sleep(LATE_S)
    return {"wall_s": times["take"] - times["start"]}


def _stamped(call: Callable[..., Any], times: dict[str, float]) -> Callable[..., Any]:
    """`call`, whose latest time is kept."""

    def run(*args: Any) -> Any:
        times[call.__name__] = time.perf_counter()
        return call(*args)

    return run


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_planted_delays_are_found_and_add_up(tmp_path: Path, ranks: int) -> None:
    results = run_ranks(_train, str(tmp_path), "ddp", nproc=ranks)
    windows = load(str(tmp_path)).record.windows
    assert windows[-1].step == STEPS
    assert sum(window.steps for window in windows) == STEPS

    def per_step(phase: str, rank: int, windows: Any = windows) -> float:
        return sum(window.spent_s[phase][rank] for window in windows) / STEPS

    for rank, result in enumerate(results):
        wall_s = sum(window.wall_s[rank] for window in windows)
        assert wall_s == pytest.approx(result["wall_s"], rel=0.02)
        late_s = LATE_S if rank == ranks - 1 else 0.0
        for phase, planted_s in (PLANTED | {"other": PLANTED["other"] + late_s}).items():
            assert per_step(phase, rank) >= planted_s, phase
        if ranks > 1 and not late_s:
            assert per_step("communication", rank) > LATE_S / 2
    own = [per_step("communication", rank) for rank in range(ranks)]
    if ranks > 1:
        assert own[-1] < min(own[:-1])  # the others wait for the last rank, not it for them
    assert set(windows[0].spent_s) == set(PHASES)


AXES = {
    "fsdp": paceline.Mesh(dp_shard=2),
    "tp": paceline.Mesh(tp=2),
    "pp": paceline.Mesh(pp=2),
}
SLOW_LAYER_S = 0.03  # of the last rank


def _train_gpt(job: Any, folder: str) -> None:
    """Train with one layer that is slow on the last rank."""
    net = small_gpt.GPT()
    if job.rank == job.world_size - 1:
        net.head.register_forward_pre_hook(lambda *_: time.sleep(SLOW_LAYER_S))
    model = small_gpt.wrap(job, net)
    training = make_training(job, model, small_gpt.make_tokens(16), count="tokens")
    training.report(folder)
    train(training, small_gpt.token_loss, until=STEPS)


@pytest.mark.parametrize("layout", AXES)
def test_a_rank_waits_for_a_slow_layer_of_the_other(tmp_path: Path, layout: str) -> None:
    run_ranks(_train_gpt, str(tmp_path), nproc=2, mesh=AXES[layout])
    record = load(str(tmp_path)).record
    if layout != "pp":  # the sizes of the unsharded model
        sizes = [p.nbytes for p in small_gpt.GPT().parameters()]
        assert record.run["weight_bytes"] == sum(record.run["buckets"]) == sum(sizes)
    windows = record.windows
    spent = {
        name: [sum(w.spent_s[name][rank] for w in windows) / STEPS for rank in range(2)]
        for name in PHASES
    }
    assert spent["communication"][0] > SLOW_LAYER_S / 2
    assert spent["forward"][1] >= SLOW_LAYER_S


def _two_loops(job: Any, folder: str) -> int:
    model = paceline.ddp(job, nn.Linear(4, 3))
    training = make_training(job, model, make_data(), global_batch=6)
    training.report(folder)
    for until in (2, 4):
        train(training, until=until)
    return training.number


def test_a_further_loop_is_no_restart(tmp_path: Path) -> None:
    assert run_ranks(_two_loops, str(tmp_path), nproc=2) == [4, 4]
    assert [run["loop"] for run in load(str(tmp_path)).record.runs] == [0, 1]


def _end(job: Any, folder: str, how: str) -> None:
    """End the loop in step 3; an error is raised on the last rank."""
    training = small_training(job)
    training.report(folder)
    for step in training.steps(until=3 if how == "until" else 40):
        backwards(training, step)
        step.update()
        if step.number < 3:
            continue
        if how == "stop":
            step.stop()
        elif how == "break":
            break
        elif how == "signal":
            os.kill(os.getpid(), signal.SIGUSR1)
        elif how == "error" and job.rank == job.world_size - 1:
            raise InjectedFault("planted")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("until", "finished"),
        ("stop", "stopped early"),
        ("break", "left by `break`"),
        ("signal", "preempted"),
        ("error", "failed or interrupted"),
    ],
)
def test_the_folder_tells_how_the_training_ended(tmp_path: Path, how: str, said: str) -> None:
    expected = {"signal": Preempted, "error": InjectedFault}.get(how)
    with pytest.raises(expected) if expected else nullcontext(), paceline.join() as job:
        _end(job, str(tmp_path), how)
    assert load(str(tmp_path)).record.end == said
    with paceline.join() as job:  # the next training has not ended
        training = small_training(job)
        training.report(str(tmp_path))
        next(training.steps(until=3))
        assert load(str(tmp_path)).record.end == ""


def test_the_folder_tells_of_an_error_of_another_rank(tmp_path: Path) -> None:
    run_failing_ranks(_end, str(tmp_path), "error", nproc=2)
    assert load(str(tmp_path)).record.end == "failed or interrupted"
