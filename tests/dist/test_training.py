"""The loop: what it does in order, what it refuses, and that all ranks stop, fail and finish together."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import weakref
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_trainings import (
    backwards,
    loss_sum,
    make_data,
    refusals,
    weights_of,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline
from paceline.clock.step_clock import OTHER, clock
from paceline.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NonFinite,
    PeerFailed,
    StepError,
)
from paceline.job.preemption import Preempted, notice
from paceline.parallel.modules import local
from paceline.testing import (
    Fault,
    InjectedFault,
    digest,
    inject,
    run_failing_ranks,
    run_ranks,
)

SLOW = pytest.mark.slow


def _model(*, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def _training(
    job: Any,
    net: nn.Module | None = None,
    *,
    samples: int = 22,
    global_batch: int = 6,
    micro_batch: int = 2,
    dropout: float = 0.0,
    static_graph: bool = False,
    **options: Any,
) -> paceline.Training:
    net = net or _model(dropout=dropout)
    model = paceline.ddp(job, net, static_graph=static_graph)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    data = make_data(samples, next(net.parameters()).dtype)
    batches = paceline.Batches(job, data, global_batch=global_batch, micro_batch=micro_batch)
    return paceline.Training(job, model, optimizer, batches, **options)


def _run(training: paceline.Training, **how: Any) -> list[float]:
    losses = []
    for step in training.steps(**how):
        backwards(training, step)
        step.update(clip_norm=1.0)
        losses.append(float(step.loss))
    return losses


# What must be the same for any number of ranks.


def _rates(job: Any) -> list[float]:
    training = _training(job, schedule=lambda step: 1 / (1 + step))
    rates = []
    for step in training.steps(epochs=1):
        backwards(training, step)
        rates.append(training.optimizers[0].param_groups[0]["lr"])
        step.update()
    return rates


def _collectives_per_step(job: Any, micro_batch: int) -> list[int]:
    counted: list[int] = []
    training = _training(job, micro_batch=micro_batch)

    def hook(state, bucket):  # type: ignore[no-untyped-def] # DDP wants its own annotations or none
        counted.append(1)
        return allreduce_hook(state, bucket)

    training.models[0].register_comm_hook(job.group, hook)  # type: ignore[operator]
    per_step = []
    for step in training.steps(epochs=2):
        before = len(counted)
        backwards(training, step)
        step.update()
        per_step.append(len(counted) - before)
    return per_step


def _gan(job: Any) -> list[float]:
    torch.manual_seed(0)
    generator = paceline.ddp(job, nn.Linear(2, 4).double())
    critic = paceline.ddp(job, nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double())
    opt_g = torch.optim.SGD(generator.parameters(), lr=0.05)
    opt_c = torch.optim.SGD(critic.parameters(), lr=0.05)
    data = TensorDataset(make_data(25).tensors[0].double())
    # Ranks have different numbers of micro-batches, and in the last step some have none.
    batches = paceline.Batches(job, data, global_batch=7, micro_batch=2)
    training = paceline.Training(job, [generator, critic], [opt_c, opt_g], batches)
    for step in training.steps(epochs=2):
        for (real,) in step:
            fake = generator(real[:, :2])
            good, bad = critic(real), critic(fake.detach())
            loss = (F.softplus(-good) + F.softplus(bad)).sum()
            step.backward(loss, count=len(real), optimizer=opt_c, reduction="sum")
            step.backward(
                F.softplus(-critic(fake)).sum(), count=len(real), optimizer=opt_g, reduction="sum"
            )
        step.update(opt_c)
        step.update(opt_g)
    return weights_of(*training.models)


def _extra_forward(job: Any, where: str) -> list[float]:
    training = _training(job, _model().double(), global_batch=7)
    model = training.models[0]
    for step in training.steps(epochs=2):
        for batch in step:
            if where == "before":
                model(batch[0])
            step.backward(loss_sum(training.models[0], batch), count=len(batch[1]), reduction="sum")
            if where == "after":
                model(batch[0]).argmax(1)
        step.update()
        if where == "between":
            model(make_data(2, torch.float64).tensors[0])
    return weights_of(*training.models)


def _loss_before_update(job: Any) -> list[float]:
    training = _training(job, _model().double(), global_batch=2, micro_batch=1)
    losses = []
    for step in training.steps(until=6):
        backwards(training, step)
        losses.append(float(step.loss))  # some ranks have no sample here
        step.update()
    return losses


def _padding(job: Any) -> tuple[list[bool], int]:
    """Which micro-batches of a rank were padding, and a running statistic that they must not change."""
    # Two values for each channel of a sample, since torch refuses to normalise a single one.
    norm = nn.BatchNorm1d(2)
    net = nn.Sequential(nn.Unflatten(1, (2, 2)), norm, nn.Flatten(), nn.Linear(4, 3))
    training = _training(job, net, samples=20)  # the last step has 2
    padding, real = [], 0
    for step in training.steps(epochs=1):
        for batch in step:
            padding.append(step.is_padding)
            real += 0 if step.is_padding else len(batch[1])
            step.backward(loss_sum(training.models[0], batch), count=len(batch[1]), reduction="sum")
        step.update()
    assert norm.training
    assert int(norm.num_batches_tracked) == padding.count(False)
    return padding, real


def _loop_and_run(job: Any) -> list[str]:
    """The weights after a loop over micro-batches, and after `step.run` with each kind of result."""
    found = []
    for kind in ("loop", "sum", "pair"):
        training = _training(job)
        model = training.models[0]
        for step in training.steps(epochs=2):
            if kind == "loop":
                backwards(training, step)
            elif kind == "sum":
                step.run(partial(loss_sum, model), reduction="sum")
            else:
                step.run(
                    lambda batch, model=model: (loss_sum(model, batch), len(batch[1])),
                    reduction="sum",
                )
            step.update(clip_norm=1.0)
        found.append(digest(weights_of(*training.models)))
    return found


def _results(job: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rates": _rates(job),
        # Samples of a micro-batch share a stream, so the cut must be the same: one sample each.
        "dropout": _run(_training(job, dropout=0.5, micro_batch=1), epochs=2),
        "gan": _gan(job),
        "loss before update": _loss_before_update(job),
        "step.run": _loop_and_run(job),
        "padding": _padding(job),
    }
    for precision in ("fp32", "bf16", "fp16"):
        losses = _run(_training(job, precision=precision), epochs=3)
        assert not torch.is_autocast_enabled("cpu")
        found[precision] = [sum(losses[:4]), sum(losses[-4:])]
        few = _training(job, global_batch=2, precision=precision)
        found[f"{precision} with fewer samples than ranks"] = _run(few, until=4)
    for where in ("nowhere", "before", "after", "between"):
        found[f"forward {where}"] = _extra_forward(job, where)
    if job.world_size > 1:
        found["collectives"] = [_collectives_per_step(job, n) for n in (1, 2, 6)]
    return found


def test_results_do_not_depend_on_the_number_of_ranks() -> None:
    one = run_ranks(_results, nproc=1)[0]
    assert one["rates"] == pytest.approx([0.1, 0.1 / 2, 0.1 / 3, 0.1 / 4])
    for precision in ("fp32", "bf16", "fp16"):
        assert one[precision][1] < one[precision][0]  # it learns
    # float64: roundings; float32: of the sums; half precision: 8 bits in the forward of one sample.
    tolerance = dict.fromkeys(one, 1e-2)
    for name in ("gan", "loss before update", *(name for name in one if "forward" in name)):
        tolerance[name] = 1e-10
    for name in ("rates", "dropout", "fp32", "fp32 with fewer samples than ranks"):
        tolerance[name] = 1e-5
    for nproc in (2, 3, 4):
        ranks = run_ranks(_results, nproc=nproc)
        for got in ranks:
            for name in sorted(set(one) - {"step.run", "padding"}):
                assert got[name] == pytest.approx(one[name], rel=tolerance[name]), name
            # One bucket, however many micro-batches; 22 samples in steps of 6 leave 4 for the last.
            assert got["collectives"] == [[1] * 8] * 3
            assert len(set(got["step.run"])) == 1
        padding = [got["padding"] for got in ranks]
        assert sum(real for _, real in padding) == 20
        assert {len(own) for own, _ in padding} == {len(padding[0][0])}
        assert any(any(own) for own, _ in padding) == (nproc > 2)


# Stopping.


def _stops(job: Any) -> list[int]:
    at_end = _training(job)
    for step in at_end.steps(epochs=50):
        backwards(at_end, step)
        step.update()
        if step.ends_epoch and step.epoch == 1 and job.rank == job.world_size - 1:
            step.stop()  # one rank is enough
    found = [at_end.number, len(_run(at_end, until=11))]  # a stop ends one loop only
    between = _training(job)
    for step in between.steps():  # endless
        backwards(between, step)
        step.update()
        if step.number == 10 and job.rank == 0:
            step.stop()
    until = _training(job)
    found += [len(_run(until, until=number)) for number in (5, 9, 9)]
    return [between.number, *found]


@pytest.mark.parametrize(
    ("nproc", "backend"), [(1, "shm"), pytest.param(2, "shm", marks=SLOW), (3, "shm"), (3, "gloo")]
)
def test_a_stop_is_after_the_same_step_on_all_ranks(
    nproc: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Over shm the control word is read at once, over Gloo when the next one is due.
    monkeypatch.setenv("PACELINE_BACKEND", backend)
    ranks = run_ranks(_stops, nproc=nproc)
    between = {rank[0] for rank in ranks}
    assert len(between) == 1
    assert between == {10} if nproc == 1 else between <= {10, 11, 12}  # the epoch ends at 12
    assert [rank[1:] for rank in ranks] == [[8, 3, 5, 4, 0]] * nproc


def _leave(job: Any, kind: str, ranks: list[int]) -> int:
    training = _training(job)
    try:
        for step in training.steps(until=3 if kind == "in the last step" else 40):
            backwards(training, step)
            leaves = step.number == 3 and job.rank in ranks
            if leaves and kind == "exit":
                raise SystemExit(0)
            if leaves and kind == "caught":
                raise ValueError("on this rank only")
            if leaves and kind == "before the update":
                break
            step.update()
            if leaves:
                break
    except ValueError:
        pass
    return training.number


@pytest.mark.parametrize(
    ("kind", "who"),
    [
        ("break", 0),
        *[
            pytest.param(*case, marks=SLOW)  # each waits 5 s, in which other ranks may leave too
            for case in (
                *(("break", 2), ("in the last step", 1), ("before the update", 2)),
                *(("exit", 1), ("caught", 1)),
            )
        ],
    ],
)
def test_a_rank_that_leaves_the_loop_is_named_within_seconds(kind: str, who: int) -> None:
    outcomes = run_failing_ranks(_leave, kind, [who], nproc=3, timeout_s=40, deadline_s=30)
    for outcome in outcomes:
        assert f"rank {who} left the training loop after step 3" in str(outcome.error)
        if kind == "break":
            assert isinstance(outcome.error, StepError if outcome.rank == who else PeerFailed)


def _added_to_the_optimizer_later(job: Any, reproducible: bool, clears: bool) -> list[float]:
    """Train the last layer from step 3 on; before, each backward gives it a gradient that is not used."""
    net = _model().double()
    model = paceline.ddp(job, net)
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    batches = paceline.Batches(job, make_data(dtype=torch.float64), global_batch=6, micro_batch=2)
    training = paceline.Training(job, model, optimizer, batches, reproducible=reproducible)
    for step in training.steps(until=5):
        if clears:
            net[3].zero_grad()
        if step.number == 3:
            optimizer.add_param_group({"params": list(net[3].parameters())})
        backwards(training, step)
        step.update()
    return weights_of(model)


def _added_later(job: Any) -> list[tuple[list[float], list[float]]]:
    return [
        (_added_to_the_optimizer_later(job, r, True), _added_to_the_optimizer_later(job, r, False))
        for r in (False, True)
    ]


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_gradients_of_earlier_steps_are_not_added_to_those_of_a_new_parameter(nproc: int) -> None:
    for cleared, straight in run_ranks(_added_later, nproc=nproc)[0]:
        assert straight == cleared


def _state_after_leaving(job: Any, kind: str) -> dict[str, Any]:
    """What a loop leaves behind, most in the second micro-batch, which is padding on rank 0 of two."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(2)
    net = nn.Sequential(
        nn.Linear(4, 4), nn.Linear(4, 4), nn.Unflatten(1, (2, 2)), norm, nn.Flatten()
    )
    precision = "bf16" if kind == "autocast" else "fp32"
    options = {"samples": 5, "global_batch": 5, "precision": precision}
    training = _training(job, net, reproducible=kind == "reproducible", **options)
    model = training.models[0]
    before = norm.running_mean.clone()
    for step in training.steps(until=1):
        for at, batch in enumerate(step):
            loss = loss_sum(model, batch)
            if at == 1 or kind == "reproducible":
                break
            step.backward(loss, count=len(batch[1]), reduction="sum")
        break
    return {
        "autocast": torch.is_autocast_enabled("cpu"),
        "BatchNorm trains": norm.training,
        "momentum": norm.momentum,
        "restored": kind != "reproducible" or torch.equal(norm.running_mean, before),
        "DDP reduces": bool(getattr(model, "require_backward_grad_sync", True)),
    }


def _states_after_leaving(job: Any) -> dict[str, Any]:
    kinds = ("autocast", "plain", "reproducible")
    return {kind: _state_after_leaving(job, kind) for kind in kinds}


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_loop_that_was_left_in_a_step_leaves_models_and_autocast_as_they_were(nproc: int) -> None:
    for states in run_ranks(_states_after_leaving, nproc=nproc):
        for kind, state in states.items():
            assert state == {
                "autocast": False,
                "BatchNorm trains": True,
                "momentum": 0.1,
                "restored": True,
                "DDP reduces": True,
            }, kind


def _after_a_left_step(job: Any, leaves: bool) -> list[float]:
    training = _training(job)
    if leaves:
        for step in training.steps(until=1):
            for batch in step:
                step.backward(
                    loss_sum(training.models[0], batch), count=len(batch[1]), reduction="sum"
                )
                break
            break
    _run(training, until=1)
    return weights_of(*training.models)


def _with_and_without_a_left_step(job: Any) -> list[list[float]]:
    return [_after_a_left_step(job, leaves) for leaves in (False, True)]


@pytest.mark.parametrize("nproc", [1, 2])
def test_gradients_of_a_left_step_are_not_added_to_the_next(nproc: int) -> None:
    straight, after = run_ranks(_with_and_without_a_left_step, nproc=nproc)[0]
    assert straight == after


def _leave_two_loops(folder: Path) -> None:
    with paceline.join() as job:
        second = _training(job, checkpoints=paceline.Checkpoints(folder / "second"))
        first = _training(job, checkpoints=paceline.Checkpoints(folder / "first"))
        for step in first.steps(until=9):
            backwards(first, step)
            step.update()
            break
        for step in second.steps(until=9):
            backwards(second, step)
            step.update()
            if step.number == 3:
                raise Preempted("SIGTERM", 0)  # as `evaluate` raises it


def test_a_preempted_evaluation_saves_the_training_in_whose_loop_it_was(tmp_path: Path) -> None:
    with pytest.raises(Preempted) as raised:
        _leave_two_loops(tmp_path)
    assert raised.value.step == 3
    assert (tmp_path / "second/step-3/manifest.json").exists()


def _leave_loops_of_two_trainings(folder: Path) -> None:
    with paceline.join() as job:
        both = [
            _training(job, checkpoints=paceline.Checkpoints(folder / name)) for name in ("a", "b")
        ]
        loops = zip(*(training.steps(until=9) for training in both), strict=True)
        for steps in loops:
            for training, step in zip(both, steps, strict=True):
                backwards(training, step)
                step.update()
            if steps[0].number == 3:
                del loops  # both generators are closed before the job is left
                raise Preempted("SIGTERM", 0)


def test_a_preempted_evaluation_saves_both_trainings_of_one_loop(tmp_path: Path) -> None:
    with pytest.raises(Preempted):
        _leave_loops_of_two_trainings(tmp_path)
    assert len(list(tmp_path.glob("*/step-3/manifest.json"))) == 2


def _leave_again_and_again(job: Any) -> list[int]:
    found = []
    for _ in range(3):
        found.append(_leave(job, "break", [0, 1, 2]))
        job.check_loop_exit()
    return found


def test_all_ranks_may_leave_the_loop() -> None:
    assert run_ranks(_leave_again_and_again, nproc=3) == [[3, 3, 3]] * 3


def _close_an_old_loop(job: Any) -> list[tuple[bool, bool, bool]]:
    """What the newer loop still has in each micro-batch, after the first has closed the old loop."""
    training = _training(job, precision="bf16")
    old = training.steps(until=9)
    next(old)
    found = []
    for step in training.steps(until=2):
        for batch in step:
            old.close()
            records_signals = signal.getsignal(signal.SIGTERM) == notice._note
            found.append((torch.is_autocast_enabled("cpu"), clock.phase != OTHER, records_signals))
            step.backward(loss_sum(training.models[0], batch), count=len(batch[1]), reduction="sum")
        step.update()
    return found


def test_an_old_loop_that_is_closed_late_takes_nothing_from_the_newer_one() -> None:
    (found,) = run_ranks(_close_an_old_loop, nproc=1)
    assert found == [(True, True, True)] * 6


def _fail_before_the_first_step(job: Any) -> int:
    training = _training(job)
    old = training.steps(until=9)
    next(old)
    training.batches.iterate = lambda *_, **__: iter(())
    with pytest.raises(StopIteration):
        next(training.steps(until=9))
    return len(training.state_dict())  # refused in a step


def test_a_new_loop_is_not_in_the_step_of_an_old_one() -> None:
    assert run_ranks(_fail_before_the_first_step, nproc=1)[0] > 0


def _signal_in_step_2(job: Any) -> None:
    training = _training(job)
    for step in training.steps(epochs=50):
        backwards(training, step)
        step.update()
        if step.number == 2 and job.rank == 0:
            os.kill(os.getpid(), signal.SIGUSR2)


def _signal_after_preempted(job: Any) -> int:
    with pytest.raises(Preempted) as raised:
        _signal_in_step_2(job)
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGUSR2)
    return raised.value.step


def test_a_signal_that_comes_after_that_of_another_rank_does_not_end_the_process() -> None:
    first, second = run_ranks(_signal_after_preempted, nproc=2)
    assert first == second


# Failures.


def _fault(job: Any, faults: list[Fault]) -> None:
    training = _training(job)
    for step in training.steps(epochs=50):
        inject(job, faults, step.number)
        backwards(training, step)
        step.update()


def test_an_error_on_one_rank_is_named_on_all() -> None:
    faults = [Fault(rank=1, step=2, kind="raise")]
    outcomes = run_failing_ranks(_fault, faults, nproc=3, faults=faults)
    assert isinstance(outcomes[1].error, InjectedFault)
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, PeerFailed)
        assert outcomes[rank].error.rank == 1
        assert "injected on rank 1 in step 2" in str(outcomes[rank].error)


def _loss_twice(job: Any) -> list[tuple[float, float]]:
    training = _training(job, micro_batch=2, samples=16)
    found = []
    for step in training.steps(epochs=1):
        first = None
        for batch in step:
            step.backward(loss_sum(training.models[0], batch), count=len(batch[1]), reduction="sum")
            first = float(step.loss) if first is None else first
        step.update()
        assert first is not None
        found.append((first, float(step.loss)))
    return found


@pytest.mark.parametrize("nproc", [1, 2])
def test_the_loss_may_be_read_again_in_a_step(nproc: int) -> None:
    each = run_ranks(_loss_twice, nproc=nproc)
    assert all(own == each[0] for own in each)
    assert any(first != last for first, last in each[0])


def _loss_after_the_loop(job: Any, ranks: list[int]) -> list[float]:
    training = _training(job)
    losses, found = [], []
    for step in training.steps(until=3):
        backwards(training, step)
        step.update()
        losses.append(step.loss)
        if step.number == 2:
            found += [float(losses[0]), float(step.loss)]
    if job.rank in ranks:
        found += [float(losses[0]), float(losses[2])]
    return found


def test_the_loss_may_be_read_after_the_loop() -> None:
    each = run_ranks(_loss_after_the_loop, [0, 1], nproc=2)
    assert each[0] == each[1]
    assert each[0][2] == each[0][0]
    assert len(set(each[0])) == 3


def _export_after_leaving(job: Any, folder: str) -> None:
    training = _training(job)
    for step in training.steps(epochs=2):
        backwards(training, step)
        step.update()
        if step.number == 2 and job.rank == 0:
            break
    training.export(f"{folder}/model.pth")


def test_an_export_after_one_rank_left_the_loop_names_it(tmp_path: Path) -> None:
    outcomes = run_failing_ranks(
        _export_after_leaving, str(tmp_path), nproc=2, timeout_s=40, deadline_s=30
    )
    for outcome in outcomes:
        assert "rank 0 left the training loop after step 2" in str(outcome.error)
    assert not list(tmp_path.iterdir())


def _saves_by_clock(job: Any, folder: str) -> list[str]:
    checkpoints = paceline.Checkpoints(folder, every_s=1e6, keep=9)
    training = _training(job, checkpoints=checkpoints)
    checkpoints._last_begun -= 2e6  # due until the first save
    _run(training, until=9)
    return sorted(path.name for path in Path(folder).glob("step-*"))


def test_a_save_by_the_clock_happens_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_BACKEND", "gloo")
    for saved in run_ranks(_saves_by_clock, str(tmp_path), nproc=2):
        assert saved == ["step-2", "step-9"], "requested after step 1, and the last step"


def _resume_twice(job: Any, folder: str) -> list[str]:
    _run(_training(job, checkpoints=paceline.Checkpoints(folder)), until=1)
    training = _training(
        job, nn.Sequential(nn.Linear(4, 3)), checkpoints=paceline.Checkpoints(folder)
    )
    texts = []
    for _ in range(2):
        with pytest.raises(CheckpointError) as raised:
            _run(training, until=3)
        texts.append(str(raised.value))
    return texts


def test_a_resume_that_failed_is_not_taken_as_done(tmp_path: Path) -> None:
    ((first, second),) = run_ranks(_resume_twice, str(tmp_path), nproc=1)
    assert first == second


def _keep_late(job: Any, folder: str) -> str:
    training = _training(job, checkpoints=paceline.Checkpoints(folder))
    _run(training, until=1)
    with pytest.raises(StepError) as raised:
        training.keep(ema=_model())
    return str(raised.value)


def test_keep_after_the_training_has_resumed_is_refused(tmp_path: Path) -> None:
    (text,) = run_ranks(_keep_late, str(tmp_path), nproc=1)
    assert "before training.steps" in text


def _load_an_earlier_step(job: Any, folder: str) -> list[int]:
    first = _training(job, checkpoints=paceline.Checkpoints(folder))
    _run(first, until=1)
    saved = first.state_dict()
    _run(first, until=3)
    training = _training(job, checkpoints=paceline.Checkpoints(folder))
    training.load_state_dict(saved)
    with pytest.raises(StepError, match="after the training had resumed"):
        training.keep(late=_model())
    numbers = []
    for step in training.steps(until=3):
        backwards(training, step)
        step.update()
        numbers.append(step.number)
    return numbers


def test_steps_continue_from_a_state_that_was_loaded_explicitly(tmp_path: Path) -> None:
    for numbers in run_ranks(_load_an_earlier_step, str(tmp_path), nproc=2):
        assert numbers == [2, 3]


def _keep_twice(job: Any) -> str:
    training = _training(job)
    ema = _model()
    training.keep(ema=ema)
    training.keep(ema=ema)
    with pytest.raises(ConfigError) as raised:
        training.keep(ema=_model())
    return str(raised.value)


def test_another_object_under_the_name_of_a_kept_one_is_refused() -> None:
    (text,) = run_ranks(_keep_twice, nproc=1)
    assert "keep(ema=...): another object is kept under this name" in text


def _half(job: Any, dtype: torch.dtype, reduction: Any) -> float:
    """The logged loss of a step whose losses are sums that their dtype cannot hold."""
    model = paceline.ddp(job, nn.Linear(4, 2).to(dtype))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    data = make_data(1024, dtype) if reduction == "sum" else make_data(40000, dtype)
    batches = paceline.Batches(
        job, data, global_batch=len(data), micro_batch=1 if reduction == "sum" else None
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = paceline.Training(job, model, optimizer, batches)
    for step in training.steps(until=1):
        for x, _ in step:
            losses = F.cross_entropy(model(x), torch.zeros(len(x)).long(), reduction="none")
            loss = losses.sum() if reduction == "sum" else losses.mean() + 8.0
            step.backward(loss, count=len(x), reduction=reduction)
        step.update()
        return float(step.loss)
    raise AssertionError


def _halves(job: Any) -> list[float]:
    return [_half(job, torch.bfloat16, "sum"), _half(job, torch.float16, "mean")]


def test_losses_of_models_in_half_precision_are_added_in_float32() -> None:
    (found,) = run_ranks(_halves, nproc=1)
    # each loss is ln 2 in 8 or 11 bits
    assert found == pytest.approx([math.log(2), 8 + math.log(2)], rel=4e-3)


def _mean(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, y)


def _each(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, y, reduction="none")


# Wrong use, and the error that every rank must get.
WRONG = {
    "mean": "StepError",
    "mean of losses": "StepError",
    "mean of tokens": "StepError",
    "sum as mean": "StepError",
    "total as mean": "StepError",
    "class weights as mean": "StepError",
    "ignored as mean": "StepError",
    "reduction": "StepError",
    "tokens as mean without a count": "StepError",
    "vector": "StepError",
    "constant": "StepError",
    "count": "StepError",
    "negative tokens": "StepError",
    "zero tokens": "StepError",
    "forgotten": "StepError",
    "twice": "StepError",
    "no update": "StepError",
    "inner break": "StepError",
    "run without a count of tokens": "StepError",
    "negative bound": "ConfigError",
    "bound of 0": "ConfigError",
    "log text": "ConfigError",
    "log none": "ConfigError",
    "log an earlier loss": "ConfigError",
    "report": "StepError",
    "log vector": "ConfigError",
    "log own name": "ConfigError",
    "static graph": "ConfigError",
    "frozen": "ConfigError",
    "not wrapped": "ConfigError",
    "text as model": "ConfigError",
    "text as optimizer": "ConfigError",
    "dataset as batches": "ConfigError",
    "no model": "ConfigError",
    "no optimizer": "ConfigError",
    "optimizer twice": "ConfigError",
    "flops": "ConfigError",
    "late reduction": "StepError",
    "run that returns three": "StepError",
    "vector as count": "StepError",
}
_LOSSES: dict[str, Any] = {
    "mean": _mean,
    "mean of tokens": _mean,
    "mean of losses": lambda out, y: _each(out, y).mean(),
    "sum as mean": lambda out, y: F.cross_entropy(out, y, reduction="sum"),
    "total as mean": lambda out, y: _each(out, y).sum(),
    "class weights as mean": lambda out, y: F.cross_entropy(out, y, torch.arange(1.0, 4.0)),
    "ignored as mean": lambda out, y: F.cross_entropy(out, y, ignore_index=int(y[0])),
    "vector": _each,
    "constant": lambda out, y: _each(out, y).sum().detach(),
}


def _wrong(job: Any, kind: str) -> None:
    if kind in ("text as model", "text as optimizer", "dataset as batches"):
        net = paceline.ddp(job, _model())
        given: Any = {
            "model": net,
            "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
            "batches": paceline.Batches(job, make_data(), global_batch=6),
        }
        text, _, name = kind.split()
        given[name] = "adam" if text == "text" else make_data()
        paceline.Training(job, **given)
    if kind in ("no model", "no optimizer", "optimizer twice"):
        net = paceline.ddp(job, _model())
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        batches = paceline.Batches(job, make_data(), global_batch=6)
        models = [] if kind == "no model" else [net]
        optimizers = {"no optimizer": [], "optimizer twice": [sgd, sgd]}.get(kind, [sgd])
        paceline.Training(job, models, optimizers, batches)
    if kind in ("frozen", "not wrapped"):
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.requires_grad_(kind != "frozen")
        batches = paceline.Batches(job, make_data(), global_batch=6)
        paceline.Training(job, model, optimizer, batches)
        return
    count = "tokens" if "tokens" in kind else "samples"
    training = _training(job, count=count, static_graph=kind == "static graph")
    previous: Any = None
    if kind == "flops":
        training.report(flops="3")  # type: ignore[arg-type]
    for step in training.steps(epochs=3 if kind == "late reduction" else 1):
        if kind == "run that returns three":
            step.run(lambda batch: (loss_sum(training.models[0], batch), 1, 2), reduction="sum")
        if kind.startswith("run "):
            step.run(lambda batch: loss_sum(training.models[0], batch), reduction="sum")
        for x, y in step:
            n: Any = {"count": len(y) + 1, "negative tokens": -1, "zero tokens": 0}.get(
                kind, len(y)
            )
            if kind == "vector as count":
                n = torch.tensor([len(y), len(y)])
            if kind == "mean of tokens":
                n = (y >= 0).sum()
            loss = _LOSSES.get(kind, lambda out, y: _each(out, y).sum())(training.models[0](x), y)
            if "as mean" in kind:
                step.backward(loss)
            elif kind != "forgotten":
                is_wrong = kind == "reduction" or (kind == "late reduction" and step.number > 3)
                reduction: Any = "median" if is_wrong else "sum"
                step.backward(loss, count=n, reduction=reduction)
            if kind == "twice":
                step.backward(loss_sum(training.models[0], (x, y)), count=n, reduction="sum")
            if kind == "inner break":
                break
        if kind != "no update":
            step.update(clip_norm={"negative bound": -1.0, "bound of 0": 0.0}.get(kind))
        if kind == "log own name":
            training.log(step=1)
        elif kind == "log an earlier loss":
            training.log(previous=previous or step.loss)
            previous = previous or step.loss
        elif kind == "report":
            training.report(progress=False)
        elif kind.startswith("log "):
            values = {"text": "a", "none": None, "vector": torch.ones(2)}
            training.log(value=values[kind[4:]])


@pytest.mark.ci
def test_wrong_use_is_refused_on_every_rank() -> None:
    for found in run_ranks(refusals, _wrong, list(WRONG), nproc=2):
        assert {kind: name for kind, (name, _) in found.items()} == WRONG
        assert "after 1 of 2 micro-batches" in found["inner break"][1]


def _train_on_pairs(job: Any, reduction: Any, lengths: list[int]) -> list[float]:
    """Losses of samples with targets and a padded one; step n uses `lengths[n]` of them, 0 masks one."""
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(13, 4), torch.randint(0, 3, (13, 2)))
    model = paceline.ddp(job, nn.Linear(4, 9))
    batches = paceline.Batches(job, data, global_batch=6, micro_batch=2)
    training = paceline.Training(job, model, torch.optim.SGD(model.parameters(), 0.5), batches)
    losses = []
    for step in training.steps(until=len(lengths)):
        length = lengths[step.number - 1] or 2
        for x, y in step:
            out = model(x).view(len(x), 3, 3)[:, : length + 1].flatten(0, 1)
            targets = F.pad(y[:, :length], (0, 1), value=-100)
            if not lengths[step.number - 1]:
                targets[0, 0] = -100
            loss = F.cross_entropy(out, targets.flatten(), reduction=reduction)
            if reduction == "mean":
                step.backward(loss, reduction="mean")
            else:
                step.backward(loss / length, count=len(y), reduction="sum")
        step.update()
        losses.append(float(step.loss))
    return losses


def _positive(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([sample for sample in samples if sample > 0])


def _train_on_the_rest(job: Any, count: str, first: float) -> float:
    """One step whose collate function drops negative samples; the value of the first sample is given."""
    model = paceline.ddp(job, nn.Linear(1, 1))
    data = [torch.tensor([value]) for value in (first, 2.0, 3.0, 4.0, 5.0, 6.0)]
    batches = paceline.Batches(job, data, global_batch=6, micro_batch=3, collate=_positive)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    training = paceline.Training(job, model, optimizer, batches, count=count)  # type: ignore[arg-type]
    for step in training.steps(until=1):
        for x in step:
            step.backward(model(x).square().mean(), count=len(x), reduction="mean")
        step.update()
    return float(step.loss)


def test_a_collate_function_that_drops_samples_is_refused_unless_tokens_are_counted() -> None:
    with pytest.raises(DataError, match="3 samples has tensors of 2 rows"):
        run_ranks(_train_on_the_rest, "samples", -1.0, nproc=1)
    (loss,) = run_ranks(_train_on_the_rest, "tokens", -1.0, nproc=1)
    assert loss > 0


@pytest.mark.parametrize("nproc", [1, 3])
def test_a_mean_over_targets_of_samples_of_one_length_is_a_mean_over_samples(nproc: int) -> None:
    expected = run_ranks(_train_on_pairs, "sum", [2] * 6, nproc=1)[0]
    for losses in run_ranks(_train_on_pairs, "mean", [2] * 6, nproc=nproc):
        assert losses == pytest.approx(expected, rel=1e-6)  # fp32, sums in another order


def test_a_mean_over_targets_is_refused_if_samples_ignore_different_numbers_of_them() -> None:
    with pytest.raises(StepError, match="a mean over a total weight of 3, but the count is 2"):
        run_ranks(_train_on_pairs, "mean", [0], nproc=1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last, self.aside = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.use_aside = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        out: torch.Tensor = self.last(hidden)
        return out + self.aside(hidden) if self.use_aside else out


def _change(job: Any, kind: str) -> None:
    net = Net()
    net.aside.requires_grad_(kind not in ("unfreeze", "wrap again"))
    training = _training(job, net, global_batch=4)
    model = training.models[0]
    for step in training.steps(epochs=1):
        if step.number == 5:
            if kind in ("unfreeze", "freeze"):
                net.aside.requires_grad_(kind == "unfreeze")
            elif kind == "wrap again":
                net.aside.requires_grad_(True)
                model = paceline.ddp(job, net)
            elif kind == "add":
                net.first.extra = nn.Parameter(torch.ones(1))
                training.optimizers[0].add_param_group({"params": [net.first.extra]})
            else:
                net.use_aside = kind == "unused on rank 1" and job.rank != 1
        for batch in step:
            loss = loss_sum(model, batch)
            if kind == "add" and step.number >= 5:
                loss = loss * net.first.extra.sum()
            step.backward(loss, count=len(batch[1]), reduction="sum")
        step.update()


@pytest.mark.parametrize(
    "kind", ["unfreeze", "wrap again", "freeze", "unused", "unused on rank 1", "add"]
)
def test_parameters_that_change_between_steps_are_named_at_once(kind: str) -> None:
    outcomes = run_failing_ranks(_change, kind, nproc=3)
    named = [o.error for o in outcomes if isinstance(o.error, StepError)]
    assert named, outcomes[0].text
    assert all(isinstance(o.error, (StepError, PeerFailed)) for o in outcomes)
    assert any("aside" in p or "extra" in p for p in named[0].parameters)
    assert "step 5" in str(named[0])


def _not_finite(job: Any, kind: str) -> None:
    training = _training(job)
    for step in training.steps(until=40):
        for batch in step:
            loss = loss_sum(training.models[0], batch)
            if step.number == 5 and job.rank == job.world_size - 1:
                loss = loss * float("nan")
            step.backward(loss, count=len(batch[1]), reduction="sum")
        step.update(clip_norm=1.0 if kind == "clipped loss" else None)


BAD = 17  # the sample with NaN


def _trained(optimizer: torch.optim.Optimizer) -> str:
    """A digest of this rank's part of the parameters, of the optimizer's state and its settings."""
    states = optimizer.state.values()
    tensors = [t for state in states for t in state.values()] + optimizer.param_groups[0]["params"]
    return digest([[local(t) for t in tensors], optimizer.param_groups[0]["lr"]])


class _Stream(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, *columns: torch.Tensor) -> None:
        self.columns = columns

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*self.columns, strict=True))


def _with_bad_sample(job: Any, kind: str, how: dict[str, Any]) -> Any:
    """Trains 10 steps. Returns what the bad step has changed, numbers of skipped steps, and the weights."""
    x, y = make_data().tensors
    x[BAD] = math.nan
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    wrap = paceline.fsdp if kind == "fsdp" else paceline.ddp
    model = wrap(job, net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    shuffled = DataLoader(TensorDataset(x, y), shuffle=True)
    data = _Stream(x, y) if kind == "stream" else shuffled
    batches = paceline.Batches(job, data, global_batch=6, micro_batch=2)
    options = how | ({"reproducible": True} if kind == "reproducible" else {})
    training = paceline.Training(
        job, model, optimizer, batches, schedule=lambda step: 1 / (1 + step), **options
    )
    clip_norm = 1.0 if kind == "clipped" else None
    changed = []
    for step in training.steps(until=10):
        is_bad = False
        for batch in step:
            is_bad |= bool(batch[0].isnan().any()) and not step.is_padding
            step.backward(loss_sum(model, batch), count=len(batch[1]), reduction="sum")
        before = _trained(optimizer)
        step.update(clip_norm=clip_norm)
        if any(paceline.gather(job, is_bad)):
            changed.append(before != _trained(optimizer))
    parameters = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    weights = torch.cat([p.detach().double().flatten() for p in parameters]).tolist()
    return changed, training.num_skipped, weights


KINDS = ["ddp", "clipped", "fsdp", "reproducible"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=SLOW), "fp16"])
def test_a_step_with_a_bad_sample_is_left_out(kind: str, precision: str) -> None:
    how = {"precision": precision, "on_non_finite": None if precision == "fp16" else "skip"}
    weights = []
    for nproc in (1, 2, 3):
        for changed, skipped, own in run_ranks(_with_bad_sample, kind, how, nproc=nproc):
            assert changed == [False] * len(changed)
            assert len(changed) == skipped == 2  # in each epoch
            weights.append(own)
    for own in weights:
        assert own == pytest.approx(weights[0], rel=1e-4 if precision == "fp32" else 0.1, abs=1e-2)


@pytest.mark.parametrize("kind", [*KINDS, "stream"])
@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_the_error_of_a_bad_sample_names_step_rank_and_sample(kind: str, nproc: int) -> None:
    steps = set()
    for outcome in run_failing_ranks(_with_bad_sample, kind, {}, nproc=nproc):
        error = outcome.error
        assert isinstance(error, NonFinite), outcome.text
        ((rank, samples),) = error.samples.items()
        assert BAD in samples
        assert len(samples) <= 2
        assert error.ranks == [rank]
        assert f"rank {rank}, sample" in str(error)
        steps.add(error.step)
    (step,) = steps
    assert 1 <= step <= 4


def _infinite_mask(job: Any, folder: str) -> int:
    model = nn.Sequential(nn.Linear(4, 3))
    model.register_buffer("mask", torch.full((3, 3), -math.inf))
    model.register_parameter("floor", nn.Parameter(torch.tensor(-math.inf), requires_grad=False))
    model = paceline.ddp(job, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, make_data(), global_batch=6)
    checkpoints = paceline.Checkpoints(folder, every_steps=1)
    training = paceline.Training(job, model, optimizer, batches, checkpoints=checkpoints)
    for step in training.steps(until=2):
        for batch in step:
            step.backward(loss_sum(model, batch), count=len(batch[1]), reduction="sum")
        step.update()
    return training.number


def _skips_with_two_optimizers(job: Any) -> Any:
    model = paceline.ddp(job, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))
    layers = paceline.unwrap(model)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers]
    batches = paceline.Batches(job, make_data(), global_batch=6)
    training = paceline.Training(job, model, optimizers, batches, on_non_finite="skip")
    for step in training.steps(until=3):
        for batch in step:
            scale = float("nan") if step.number == 2 and job.rank == 0 else 1.0
            step.backward(scale * F.cross_entropy(model(batch[0]), batch[1]))
        for optimizer in optimizers:
            step.update(optimizer)
    return training.num_skipped


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_step_of_several_optimizers_is_left_out_once(nproc: int) -> None:
    assert run_ranks(_skips_with_two_optimizers, nproc=nproc) == [1] * nproc


def _diverged_statistics(job: Any, folder: str) -> None:
    model = paceline.ddp(job, nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, make_data(), global_batch=6)
    checkpoints = paceline.Checkpoints(folder, every_steps=1)
    training = paceline.Training(job, model, optimizer, batches, checkpoints=checkpoints)
    for step in training.steps(until=2):
        for batch in step:
            step.backward(loss_sum(model, batch), count=len(batch[1]), reduction="sum")
        step.update()
        paceline.unwrap(model)[1].running_var.fill_(math.inf)


def test_infinite_statistics_are_not_saved(tmp_path: Path) -> None:
    for outcome in run_failing_ranks(_diverged_statistics, str(tmp_path), nproc=1):
        assert isinstance(outcome.error, NonFinite), outcome.text
        assert outcome.error.parameters == ["1.running_var"]


def test_what_is_not_trained_may_be_infinite(tmp_path: Path) -> None:
    assert run_ranks(_infinite_mask, str(tmp_path), nproc=2) == [2, 2]


@pytest.mark.parametrize("kind", ["loss", "clipped loss"])
@pytest.mark.parametrize(
    ("nproc", "backend"), [pytest.param(1, "shm", marks=SLOW), (2, "gloo"), (3, "shm")]
)
def test_nan_is_found_on_all_ranks(
    nproc: int, backend: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_BACKEND", backend)
    for outcome in run_failing_ranks(_not_finite, kind, nproc=nproc):
        assert isinstance(outcome.error, NonFinite), outcome.text
        if kind == "clipped loss":
            assert outcome.error.parameters == ["0.weight", "0.bias", "3.weight", "3.bias"]
        assert (outcome.error.step, outcome.error.ranks) == (5, [nproc - 1])


# Memory, precision, the host name.


def _dtypes_of_two_optimizers(job: Any) -> set[str]:
    """A GAN whose generator step runs the critic again after the critic's backward."""
    generator, critic = (paceline.ddp(job, nn.Linear(4, 4)) for _ in range(2))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (critic, generator)]
    batches = paceline.Batches(job, make_data(), global_batch=6, micro_batch=2)
    training = paceline.Training(job, [generator, critic], optimizers, batches, precision="bf16")
    seen = set()
    for step in training.steps(until=2):
        for x, _ in step:
            fake = generator(x)
            first = critic(fake.detach())
            step.backward(first.sum(), count=len(x), optimizer=optimizers[0], reduction="sum")
            second = critic(fake)  # without autocast it raises: fake is bf16, the weights are fp32
            step.backward(second.sum(), count=len(x), optimizer=optimizers[1], reduction="sum")
            seen |= {str(out.dtype) for out in (fake, first, second)}
            seen.add(f"autocast after the last backward: {torch.is_autocast_enabled('cpu')}")
        for optimizer in optimizers:
            step.update(optimizer)
    return seen


def _trainings_alive(job: Any) -> list[bool]:
    """Whether the models of trainings that ended, or were left by `break`, are still in memory."""
    models = []
    for number in range(3):
        training = _training(job)
        models.append(weakref.ref(paceline.unwrap(training.models[0])))
        for step in training.steps(until=3):
            backwards(training, step)
            step.update()
            if number == 1:
                break
    del training, step
    gc.collect()
    return [model() is not None for model in models]


def _dtypes_and_memory(job: Any) -> tuple[set[str], list[bool]]:
    return _dtypes_of_two_optimizers(job), _trainings_alive(job)


def test_autocast_of_two_optimizers_and_memory_of_earlier_trainings() -> None:
    dtypes = {"torch.bfloat16", "autocast after the last backward: False"}
    assert run_ranks(_dtypes_and_memory, nproc=2) == [(dtypes, [False, False, False])] * 2


def _forbidden() -> str:
    raise AssertionError("the host name was looked up in a step without an error")


def test_a_step_without_an_error_does_not_look_up_the_host_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with paceline.join() as job:
        training = _training(job, count="tokens")
        monkeypatch.setattr("paceline.errors.socket.gethostname", _forbidden)
        assert len(_run(training, until=3)) == 3


# Reporting and checkpoints.


def _report(job: Any, folder: str) -> None:
    training = _training(job)
    training.report(folder)
    seen = torch.zeros(())
    for step in training.steps(epochs=2):
        backwards(training, step)
        step.update(clip_norm=1.0)
        seen += 1  # the log holds the value of its step
        training.log(loss=step.loss, norm=step.grad_norm, seen=seen, bad=float("nan"))


def test_the_log_has_one_line_a_step_with_the_loss_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = []
    for nproc, backend in ((1, "shm"), (3, "shm"), (2, "gloo")):
        monkeypatch.setenv("PACELINE_BACKEND", backend)
        folder = tmp_path / f"{nproc} {backend}"
        run_ranks(_report, str(folder), nproc=nproc)
        text = (folder / "metrics.jsonl").read_text()
        logs.append([json.loads(line) for line in text.splitlines()])
    for lines in logs:
        assert [line["step"] for line in lines] == list(range(1, 9))
        assert [line["seen"] for line in lines] == list(range(1, 9))
        assert [line["epoch"] for line in lines] == [0] * 4 + [1] * 4
        assert {line["bad"] for line in lines} == {"nan"}
        for name in ("loss", "norm"):
            want = [line[name] for line in logs[0]]
            assert [line[name] for line in lines] == pytest.approx(want, rel=1e-4)


def _resumed(job: Any, folder: str, until: int) -> Any:
    checkpoints = paceline.Checkpoints(folder, every_steps=2)
    training = _training(job, schedule=lambda s: 1 / (1 + s), checkpoints=checkpoints)
    losses = _run(training, until=until)
    training.export(f"{folder}/out/model.pth")
    return losses, weights_of(*training.models)


@pytest.mark.parametrize("nproc", [*[pytest.param(n, marks=SLOW) for n in (1, 2, 3)], 4])
def test_a_resumed_training_ends_bit_for_bit_where_a_straight_one_ends(
    nproc: int, tmp_path: Path
) -> None:
    straight = run_ranks(_resumed, str(tmp_path / "a"), 9, nproc=nproc)
    run_ranks(_resumed, str(tmp_path / "b"), 4, nproc=nproc)
    resumed = run_ranks(_resumed, str(tmp_path / "b"), 9, nproc=nproc)
    for rank in range(nproc):
        assert resumed[rank][0] == straight[rank][0][4:]
        assert resumed[rank][1] == straight[rank][1]
    model = _model()  # the file has the model's own names, without "module."
    model.load_state_dict(torch.load(tmp_path / "b/out/model.pth", weights_only=True))
    assert weights_of(model) == resumed[0][1]


def _fails_with_a_long_clean_up(job: Any, where: str) -> tuple[str, bool]:
    """The error, and whether the clean-up of rank 0 has seen that all peers got theirs."""
    store, rank, told = job.store.clone(), job.rank, [False]

    def clean_up() -> None:
        store.wait([f"told/{rank}" for rank in range(1, job.world_size)], timedelta(seconds=12))
        told[0] = True

    class Slow:
        def log(self, step: int, values: Any) -> None: ...

        def close(self) -> None:
            clean_up()

    try:
        with job:
            training = _training(job)
            if where == "logger":
                training.report(loggers=[Slow()])
            elif where == "action" and rank == 0:
                job.on_leave(clean_up)
            for step in training.steps(epochs=1):
                backwards(training, step)
                if rank == 0:
                    raise ZeroDivisionError
                step.update()
    except Exception as error:
        if rank != 0:
            store.set(f"told/{rank}", "")
        elif where == "finally":
            clean_up()
        return f"{type(error).__name__}: {error}", told[0]
    raise AssertionError


@pytest.mark.parametrize("nproc", [2, 3])
@pytest.mark.parametrize("where", ["logger", "action", "finally"])
def test_the_peers_of_a_failed_rank_do_not_wait_for_its_clean_up(where: str, nproc: int) -> None:
    first, *others = run_ranks(_fails_with_a_long_clean_up, where, nproc=nproc)
    assert first[0].startswith("ZeroDivisionError")
    assert first[1]
    for text, _ in others:
        assert text.startswith("PeerFailed: rank 0 failed first: ZeroDivisionError")


@pytest.mark.ci
def test_the_number_of_ranks_may_change_and_nothing_saved_is_lost(tmp_path: Path) -> None:
    straight = run_ranks(_resumed, str(tmp_path / "a"), 9, nproc=1)[0]
    for nproc, until in ((2, 3), (1, 5), (3, 9)):
        resumed = run_ranks(_resumed, str(tmp_path / "b"), until, nproc=nproc)[0]
    assert resumed[1] == pytest.approx(straight[1], rel=1e-4)
