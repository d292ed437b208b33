"""How a training ends: all ranks stop, leave, fail and find NaN together."""

from __future__ import annotations

import gc
import math
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_trainings import (
    backwards,
    loss_sum,
    make_data,
    run_loop,
    small_net,
    small_training,
    weights_of,
)
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline
from paceline.clock.step_clock import OTHER, clock
from paceline.errors import NonFinite, PeerFailed, StepError
from paceline.job.preemption import Preempted, notice
from paceline.parallel.modules import local
from paceline.testing import Fault, InjectedFault, digest, inject, run_failing_ranks, run_ranks

SLOW = pytest.mark.slow


# Stopping and leaving.


def _stops(job: Any) -> list[int]:
    at_end = small_training(job)
    for step in at_end.steps(epochs=50):
        backwards(at_end, step)
        step.update()
        if step.ends_epoch and step.epoch == 1 and job.rank == job.world_size - 1:
            step.stop()  # one rank is enough
    found = [at_end.number, len(run_loop(at_end, until=11))]  # a stop ends one loop only
    between = small_training(job)
    for step in between.steps():  # endless
        backwards(between, step)
        step.update()
        if step.number == 10 and job.rank == 0:
            step.stop()
    until = small_training(job)
    found += [len(run_loop(until, until=number)) for number in (5, 9, 9)]
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
    training = small_training(job)
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
    net = small_net().double()
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


def _state_after_leaving(job: Any, kind: str) -> dict[str, Any]:
    """What a loop leaves behind, most in the second micro-batch, which is padding on rank 0 of two."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(2)
    net = nn.Sequential(
        nn.Linear(4, 4), nn.Linear(4, 4), nn.Unflatten(1, (2, 2)), norm, nn.Flatten()
    )
    precision = "bf16" if kind == "autocast" else "fp32"
    options = {"samples": 5, "global_batch": 5, "precision": precision}
    training = small_training(job, net, reproducible=kind == "reproducible", **options)
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


def _after_a_left_step(job: Any, leaves: bool) -> list[float]:
    training = small_training(job)
    if leaves:
        for step in training.steps(until=1):
            for batch in step:
                step.backward(
                    loss_sum(training.models[0], batch), count=len(batch[1]), reduction="sum"
                )
                break
            break
    run_loop(training, until=1)
    return weights_of(*training.models)


def _what_is_left(job: Any) -> dict[str, Any]:
    added = [
        [_added_to_the_optimizer_later(job, reproducible, clears) for clears in (True, False)]
        for reproducible in (False, True)
    ]
    return {
        "states": [_state_after_leaving(job, k) for k in ("autocast", "plain", "reproducible")],
        "weights": [_after_a_left_step(job, leaves) for leaves in (False, True)],
        "added": added,
    }


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_a_left_step_leaves_no_gradients_and_models_and_autocast_as_they_were(nproc: int) -> None:
    for found in run_ranks(_what_is_left, nproc=nproc):
        for state in found["states"]:
            assert state == {
                "autocast": False,
                "BatchNorm trains": True,
                "momentum": 0.1,
                "restored": True,
                "DDP reduces": True,
            }
        straight, after = found["weights"]
        assert straight == after
        for cleared, straight in found["added"]:
            assert straight == cleared


def _leave_two_loops(folder: Path) -> None:
    with paceline.join() as job:
        second = small_training(job, checkpoints=paceline.Checkpoints(folder / "second"))
        first = small_training(job, checkpoints=paceline.Checkpoints(folder / "first"))
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
            small_training(job, checkpoints=paceline.Checkpoints(folder / name))
            for name in ("a", "b")
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


def test_an_old_loop_that_is_closed_late_takes_nothing_from_the_newer_one() -> None:
    """What the newer loop still has in each micro-batch, after the first has closed the old loop."""
    with paceline.join() as job:
        training = small_training(job, precision="bf16")
        old = training.steps(until=9)
        next(old)
        for step in training.steps(until=2):
            for batch in step:
                old.close()  # type: ignore[attr-defined]
                assert signal.getsignal(signal.SIGTERM) == notice._note
                assert torch.is_autocast_enabled("cpu")
                assert clock.phase != OTHER
                loss = loss_sum(training.models[0], batch)
                step.backward(loss, count=len(batch[1]), reduction="sum")
            step.update()


def test_a_new_loop_is_not_in_the_step_of_an_old_one() -> None:
    with paceline.join() as job:
        training = small_training(job)
        old = training.steps(until=9)
        next(old)
        training.batches.iterate = lambda *_, **__: iter(())  # type: ignore[method-assign]
        with pytest.raises(StopIteration):
            next(training.steps(until=9))
        assert training.state_dict()  # refused in a step


def _signal_in_step_2(job: Any) -> None:
    training = small_training(job)
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


def _export_after_leaving(job: Any, folder: str) -> None:
    training = small_training(job)
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


# Failures.


def _fault(job: Any, faults: list[Fault]) -> None:
    training = small_training(job)
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
            training = small_training(job)
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


@pytest.mark.parametrize("where", ["logger", "action", "finally"])
def test_the_peers_of_a_failed_rank_do_not_wait_for_its_clean_up(where: str) -> None:
    first, *others = run_ranks(_fails_with_a_long_clean_up, where, nproc=3)
    assert first[0].startswith("ZeroDivisionError")
    assert first[1]
    for text, _ in others:
        assert text.startswith("PeerFailed: rank 0 failed first: ZeroDivisionError")


# NaN and infinity.


def _not_finite(job: Any) -> list[tuple[int, list[int], list[str] | None]]:
    """Step, ranks and parameters of the error of a NaN in step 5, without clipping and with it."""
    found = []
    for clip_norm in (None, 1.0):
        training = small_training(job)
        try:
            for step in training.steps(until=40):
                for batch in step:
                    loss = loss_sum(training.models[0], batch)
                    if step.number == 5 and job.rank == job.world_size - 1:
                        loss = loss * float("nan")
                    step.backward(loss, count=len(batch[1]), reduction="sum")
                step.update(clip_norm=clip_norm)
        except NonFinite as error:
            found.append((error.step, error.ranks, error.facts.get("parameters")))
        gc.collect()  # closes the loop that the error has left
        job.check_loop_exit()
    return found


@pytest.mark.parametrize(
    ("nproc", "backend"), [pytest.param(1, "shm", marks=SLOW), (2, "gloo"), (3, "shm")]
)
def test_nan_is_found_on_all_ranks(
    nproc: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_BACKEND", backend)
    for plain, clipped in run_ranks(_not_finite, nproc=nproc):
        assert plain[:2] == clipped[:2] == (5, [nproc - 1])
        assert clipped[2] == ["0.weight", "0.bias", "3.weight", "3.bias"]


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


def _left_out(job: Any, precision: str) -> list[Any]:
    how = {"precision": precision, "on_non_finite": None if precision == "fp16" else "skip"}
    return [_with_bad_sample(job, kind, how) for kind in KINDS]


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=SLOW), "fp16"])
def test_a_step_with_a_bad_sample_is_left_out(precision: str) -> None:
    weights: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    for nproc in (1, 2, 3):
        for results in run_ranks(_left_out, precision, nproc=nproc):
            for kind, (changed, skipped, own) in zip(KINDS, results, strict=True):
                assert changed == [False] * len(changed)
                assert len(changed) == skipped == 2  # in each epoch
                weights[kind].append(own)
    tolerance = 1e-4 if precision == "fp32" else 0.1
    for found in weights.values():
        for own in found:
            assert own == pytest.approx(found[0], rel=tolerance, abs=1e-2)


def _errors_of_a_bad_sample(job: Any) -> list[tuple[int, dict[int, list[int]], str]]:
    found = []
    for kind in [*KINDS, "stream"]:
        try:
            _with_bad_sample(job, kind, {})
        except NonFinite as error:
            found.append((error.step, error.samples, str(error)))
        gc.collect()  # closes the loop that the error has left
        job.check_loop_exit()
    return found


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_the_error_of_a_bad_sample_names_step_rank_and_sample(nproc: int) -> None:
    ranks = run_ranks(_errors_of_a_bad_sample, nproc=nproc)
    assert [each == ranks[0] for each in ranks] == [True] * nproc
    assert len(ranks[0]) == len(KINDS) + 1
    for step, samples_of, text in ranks[0]:
        ((rank, samples),) = samples_of.items()
        assert BAD in samples
        assert len(samples) <= 2
        assert f"rank {rank}, sample" in text
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


def _skips_a_bad_sample(job: Any, folder: str) -> list[tuple[int, torch.Tensor]]:
    model = paceline.ddp(job, nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, make_data(), global_batch=6)
    training = paceline.Training(
        job,
        model,
        optimizer,
        batches,
        checkpoints=paceline.Checkpoints(folder, every_steps=3),
        on_non_finite="skip",
    )
    seen = []
    for step in training.steps(until=3):
        for batch in step:
            if step.number == 2 and job.rank == 0:
                batch[0][0] = math.nan
            step.backward(loss_sum(model, batch), count=len(batch[1]), reduction="sum")
        step.update()
        seen.append((training.num_skipped, paceline.unwrap(model)[1].running_mean.clone()))
    return seen


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_a_step_that_is_left_out_leaves_no_trace_in_batchnorm(nproc: int, tmp_path: Path) -> None:
    for seen in run_ranks(_skips_a_bad_sample, str(tmp_path), nproc=nproc):
        assert [number for number, _ in seen] == [0, 1, 1]
        first, second, third = (mean for _, mean in seen)
        assert torch.equal(first, second)
        assert not torch.equal(second, third)


def test_infinite_statistics_are_not_saved(tmp_path: Path) -> None:
    for outcome in run_failing_ranks(_diverged_statistics, str(tmp_path), nproc=1):
        assert isinstance(outcome.error, NonFinite), outcome.text
        assert outcome.error.parameters == ["1.running_var"]


def test_what_is_not_trained_may_be_infinite(tmp_path: Path) -> None:
    assert run_ranks(_infinite_mask, str(tmp_path), nproc=2) == [2, 2]
