"""The loop: what it does in order, what it refuses, and that all ranks stop, fail and finish together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import (
    ConfigError,
    CountError,
    GradientError,
    LossError,
    NonFinite,
    PeerFailed,
    StepError,
)
from paceline.testing import Fault, InjectedFault, inject, run_failing_ranks, run_ranks

N = 22
SLOW = pytest.mark.slow


def _data(n: int = N) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 4, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1))


def _model(*, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def _training(
    job: Any, *, lr: float = 0.1, micro_batch: int = 2, **options: Any
) -> paceline.Training:
    model = paceline.ddp(job, _model(dropout=options.pop("dropout", 0.0)))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    batches = paceline.Batches(job, _data(), global_batch=6, micro_batch=micro_batch)
    return paceline.Training(job, model, optimizer, batches, **options)


def _run(training: paceline.Training, **how: Any) -> list[float]:
    losses = []
    model = training.models[0]
    for step in training.steps(**how):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y, reduction="sum"), count=len(y))
        step.update(clip_norm=1.0)
        losses.append(float(step.loss))
    return losses


def _weights(training: paceline.Training) -> torch.Tensor:
    inner = paceline.unwrap(training.models[0])
    return torch.cat([p.detach().reshape(-1) for p in inner.parameters()])


# What must be the same for any number of ranks.


def _dropout(job: Any, micro_batch: int) -> list[float]:
    return _run(_training(job, dropout=0.5, micro_batch=micro_batch), epochs=2)


def test_dropout_does_not_depend_on_ranks_where_micro_batches_do_not() -> None:
    # Samples of a micro-batch share a stream, so the cut must be the same: one sample each.
    want = run_ranks(_dropout, 1, nproc=1)[0]
    for nproc in (2, 3):
        for got in run_ranks(_dropout, 1, nproc=nproc):
            assert got == pytest.approx(want, rel=1e-5)


def _schedule(job: Any) -> list[float]:
    training = _training(job, schedule=lambda step: 1 / (1 + step))
    rates = []
    for step in training.steps(epochs=1):
        for x, y in step:
            loss = F.cross_entropy(training.models[0](x), y, reduction="sum")
            step.backward(loss, count=len(y))
        rates.append(training.optimizers[0].param_groups[0]["lr"])
        step.update()
    return rates


@pytest.mark.parametrize("nproc", [1, 3])
def test_the_schedule_counts_optimizer_steps(nproc: int) -> None:
    want = [0.1, 0.1 / 2, 0.1 / 3, 0.1 / 4]
    for rates in run_ranks(_schedule, nproc=nproc):
        assert rates == pytest.approx(want)


def _precisions(job: Any) -> dict[str, tuple[float, float]]:
    found = {}
    for precision in ("fp32", "bf16", "fp16", "auto"):
        losses = _run(_training(job, precision=precision), epochs=3)
        assert not torch.is_autocast_enabled("cpu")
        found[precision] = sum(losses[:4]), sum(losses[-4:])
    return found


def test_every_precision_learns_on_cpu() -> None:
    one = run_ranks(_precisions, nproc=1)[0]
    assert all(last < first for first, last in one.values())
    assert one["auto"] in (one["fp32"], one["bf16"])
    for two in run_ranks(_precisions, nproc=2):
        for precision, sums in two.items():
            # Rounding to 8 bits (bf16) in the forward of one sample.
            assert sums == pytest.approx(one[precision], rel=1e-2)


def _fewer_samples_than_ranks(job: Any) -> dict[str, list[float]]:
    found = {}
    for precision in ("fp32", "bf16", "fp16"):
        model = paceline.ddp(job, _model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = paceline.Batches(job, _data(), global_batch=2)
        training = paceline.Training(job, model, optimizer, batches, precision=precision)
        found[precision] = _run(training, until=4)
    return found


def test_ranks_without_samples_from_the_first_step_on() -> None:
    want = run_ranks(_fewer_samples_than_ranks, nproc=1)[0]
    for got in run_ranks(_fewer_samples_than_ranks, nproc=4):
        for precision, losses in got.items():
            rel = 1e-5 if precision == "fp32" else 1e-2
            assert losses == pytest.approx(want[precision], rel=rel)


def _collectives_per_step(job: Any, micro_batch: int) -> list[int]:
    counted: list[int] = []
    model = paceline.ddp(job, _model())

    def hook(state, bucket):  # type: ignore[no-untyped-def] # DDP wants its own annotations or none
        counted.append(1)
        return allreduce_hook(state, bucket)

    model.register_comm_hook(job.group, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, _data(), global_batch=6, micro_batch=micro_batch)
    training = paceline.Training(job, model, optimizer, batches)
    per_step = []
    for step in training.steps(epochs=2):
        before = len(counted)
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y, reduction="sum"), count=len(y))
        step.update()
        per_step.append(len(counted) - before)
    return per_step


@pytest.mark.parametrize("micro_batch", [1, pytest.param(2, marks=SLOW), 6])
def test_a_step_has_one_set_of_collectives_however_many_micro_batches(micro_batch: int) -> None:
    # One bucket; 22 samples in steps of 6 leave 4 for the last, and rank 2 may have fewer than others.
    for per_step in run_ranks(_collectives_per_step, micro_batch, nproc=3):
        assert per_step == [1] * 8


def _gan(job: Any) -> list[float]:
    torch.manual_seed(0)
    generator = paceline.ddp(job, nn.Linear(2, 4).double())
    critic = paceline.ddp(job, nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double())
    opt_g = torch.optim.SGD(generator.parameters(), lr=0.05)
    opt_c = torch.optim.SGD(critic.parameters(), lr=0.05)
    data = TensorDataset(_data(25).tensors[0].double())
    # Ranks have different numbers of micro-batches, and in the last step some have none.
    batches = paceline.Batches(job, data, global_batch=7, micro_batch=2)
    training = paceline.Training(job, [generator, critic], [opt_c, opt_g], batches)
    for step in training.steps(epochs=2):
        for (real,) in step:
            fake = generator(real[:, :2])
            good, bad = critic(real), critic(fake.detach())
            loss = (F.softplus(-good) + F.softplus(bad)).sum()
            step.backward(loss, count=len(real), optimizer=opt_c)
            step.backward(F.softplus(-critic(fake)).sum(), count=len(real), optimizer=opt_g)
        step.update(opt_c)
        step.update(opt_g)
    models = [paceline.unwrap(generator), paceline.unwrap(critic)]
    return [x for m in models for p in m.parameters() for x in p.detach().reshape(-1).tolist()]


def test_two_optimizers_train_as_on_one_rank() -> None:
    want = run_ranks(_gan, nproc=1)[0]
    for nproc in (2, 3, 4):
        for got in run_ranks(_gan, nproc=nproc):
            assert got == pytest.approx(want, rel=1e-10)


# Stopping.


def _stop_at_end_of_epoch(job: Any) -> int:
    training = _training(job)
    for step in training.steps(epochs=50):
        for x, y in step:
            loss = F.cross_entropy(training.models[0](x), y, reduction="sum")
            step.backward(loss, count=len(y))
        step.update()
        if step.ends_epoch and step.epoch == 1 and job.rank == job.world_size - 1:
            step.stop()  # one rank's word is enough
    return training.number


@pytest.mark.parametrize("nproc", [1, 3])
def test_a_stop_at_the_end_of_an_epoch_is_that_step_on_all_ranks(nproc: int) -> None:
    assert run_ranks(_stop_at_end_of_epoch, nproc=nproc) == [8] * nproc


def _stop_in_between(job: Any) -> int:
    training = _training(job)
    for step in training.steps():  # endless
        for x, y in step:
            loss = F.cross_entropy(training.models[0](x), y, reduction="sum")
            step.backward(loss, count=len(y))
        step.update()
        if step.number == 10 and job.rank == 0:
            step.stop()
    return training.number


@pytest.mark.parametrize(
    ("nproc", "backend"), [(1, "shm"), pytest.param(2, "shm", marks=SLOW), (3, "shm"), (3, "gloo")]
)
def test_a_stop_is_after_the_same_step_on_all_ranks(
    nproc: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Over shm the control word is read at once, over Gloo when the next one is due.
    monkeypatch.setenv("PACELINE_BACKEND", backend)
    numbers = run_ranks(_stop_in_between, nproc=nproc)
    assert len(set(numbers)) == 1
    assert numbers[0] == 10 if nproc == 1 else 10 <= numbers[0] <= 12  # the epoch ends at 12


def _until(job: Any) -> tuple[int, int, int]:
    training = _training(job)
    first = len(_run(training, until=5))
    second = len(_run(training, until=9))
    third = len(_run(training, until=9))  # finished: says so, and gives no step
    return first, second, third


@pytest.mark.parametrize("nproc", [1, 3])
def test_until_counts_steps_from_the_start(nproc: int) -> None:
    assert run_ranks(_until, nproc=nproc) == [(5, 4, 0)] * nproc


def _break(job: Any, ranks: list[int]) -> int:
    training = _training(job)
    for step in training.steps(epochs=50):
        for x, y in step:
            loss = F.cross_entropy(training.models[0](x), y, reduction="sum")
            step.backward(loss, count=len(y))
        step.update()
        if step.number == 3 and job.rank in ranks:
            break
    return training.number


def test_a_break_on_all_ranks_is_no_error() -> None:
    assert len(run_ranks(_break, [0, 1, 2], nproc=3)) == 3


def _break_twice(job: Any) -> int:
    for _ in range(3):
        _break(job, [0, 1, 2])
        job.settle()
    return 3


def test_loops_may_be_left_again_and_again() -> None:
    assert run_ranks(_break_twice, nproc=3) == [3, 3, 3]


def _break_in_the_last_step(job: Any) -> None:
    training = _training(job)
    for step in training.steps(until=3):
        for x, y in step:
            loss = F.cross_entropy(training.models[0](x), y, reduction="sum")
            step.backward(loss, count=len(y))
        step.update()
        if step.number == 3 and job.rank == 1:
            break


def test_a_break_where_the_others_finish_is_an_error_on_all() -> None:
    for outcome in run_failing_ranks(_break_in_the_last_step, nproc=2):
        assert "rank 1 left the training loop after step 3, rank 0 went on" in str(outcome.error)


@pytest.mark.parametrize("who", [0, 2])
def test_a_break_on_one_rank_is_an_error_on_all(who: int) -> None:
    outcomes = run_failing_ranks(_break, [who], nproc=3)
    for outcome in outcomes:
        assert isinstance(outcome.error, StepError if outcome.rank == who else PeerFailed)
        assert f"rank {who} left the training loop after step 3" in str(outcome.error)


# Failures.


def _fault(job: Any, faults: list[Fault]) -> None:
    training = _training(job)
    for step in training.steps(epochs=50):
        inject(job, faults, step.number)
        for x, y in step:
            loss = F.cross_entropy(training.models[0](x), y, reduction="sum")
            step.backward(loss, count=len(y))
        step.update()


def test_an_error_on_one_rank_is_named_on_all() -> None:
    faults = [Fault(rank=1, step=2, kind="raise")]
    outcomes = run_failing_ranks(_fault, faults, nproc=3, faults=faults)
    assert isinstance(outcomes[1].error, InjectedFault)
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, PeerFailed)
        assert outcomes[rank].error.rank == 1
        assert "injected on rank 1 in step 2" in str(outcomes[rank].error)


def _bad(job: Any, kind: str) -> Any:
    data = _data()
    model = paceline.ddp(job, _model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, data, global_batch=6, micro_batch=2)
    count = "tokens" if kind in ("zero", "negative") else "samples"
    training = paceline.Training(job, model, optimizer, batches, count=count)
    for step in training.steps(epochs=1):
        for x, y in step:
            out = model(x)
            loss, n = F.cross_entropy(out, y, reduction="sum"), len(y)
            if kind == "mean":
                loss = F.cross_entropy(out, y)
            elif kind == "mean of losses":
                loss = F.cross_entropy(out, y, reduction="none").mean()
            elif kind == "vector":
                loss = F.cross_entropy(out, y, reduction="none")
            elif kind == "constant":
                loss = loss.detach()
            elif kind == "count":
                n = n + 1
            elif kind == "negative":
                n = -1
            elif kind == "zero":
                n = 0
            if kind != "forgotten":
                step.backward(loss, count=n)
            if kind == "break" and not step_is_single(step):
                break
        if kind != "no update":
            step.update()
    return "trained"


def step_is_single(step: Any) -> bool:
    return bool(step._planned.num_micro_batches < 2)


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=SLOW), 2, pytest.param(3, marks=SLOW)])
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("mean", LossError),
        ("mean of losses", LossError),
        ("vector", LossError),
        ("constant", LossError),
        ("count", CountError),
        ("negative", CountError),
        ("zero", CountError),
        ("forgotten", StepError),
        ("no update", StepError),
    ],
)
def test_wrong_use_is_named_on_every_rank(kind: str, error: type[Exception], nproc: int) -> None:
    for outcome in run_failing_ranks(_bad, kind, nproc=nproc):
        assert isinstance(outcome.error, (error, PeerFailed)), outcome.text
        if isinstance(outcome.error, PeerFailed):
            assert error.__name__ in outcome.error.what


def test_a_break_of_the_inner_loop_is_named() -> None:
    error = run_failing_ranks(_bad, "break", nproc=1)[0].error
    assert isinstance(error, StepError)
    assert "after 1 of 3 micro-batches" in str(error)


def _not_finite(job: Any, clip: float | None) -> None:
    training = _training(job)
    model = training.models[0]
    for step in training.steps(epochs=40):
        for x, y in step:
            loss = F.cross_entropy(model(x), y, reduction="sum")
            if step.number == 5 and job.rank == job.world_size - 1:
                loss = loss * float("nan")
            step.backward(loss, count=len(y))
        step.update(clip_norm=clip)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize(
    ("nproc", "backend"),
    [pytest.param(1, "shm", marks=SLOW), (2, "gloo"), (3, "shm")],
)
def test_nan_is_found_on_all_ranks(
    nproc: int, backend: str, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_BACKEND", backend)
    for outcome in run_failing_ranks(_not_finite, clip, nproc=nproc):
        assert isinstance(outcome.error, NonFinite), outcome.text
        if clip is not None:
            assert outcome.error.parameters == ["0.weight", "0.bias", "3.weight", "3.bias"]
        else:
            assert outcome.error.step == 5
            assert outcome.error.ranks == [nproc - 1]


def _model_that_cannot_be_trained(job: Any, kind: str) -> None:
    model = _model()
    if kind == "frozen":
        model.requires_grad_(False)
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, _data(), global_batch=6)
    paceline.Training(job, model, optimizer, batches)


@pytest.mark.parametrize(("kind", "nproc"), [("frozen", 1), ("bare", 3)])
def test_models_that_cannot_be_trained_are_refused_on_all_ranks(kind: str, nproc: int) -> None:
    for outcome in run_failing_ranks(_model_that_cannot_be_trained, kind, nproc=nproc):
        assert isinstance(outcome.error, ConfigError), outcome.text


def _unused(job: Any) -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "idle": nn.Linear(4, 3)})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.parts["used"](x)
            return out

    net = paceline.ddp(job, Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batches = paceline.Batches(job, _data(), global_batch=6)
    training = paceline.Training(job, net, optimizer, batches)
    for step in training.steps(epochs=1):
        for x, y in step:
            step.backward(F.cross_entropy(net(x), y, reduction="sum"), count=len(y))
        step.update()


def test_an_unused_parameter_is_named() -> None:
    errors = [o.error for o in run_failing_ranks(_unused, nproc=2)]
    named = [e for e in errors if isinstance(e, GradientError)]
    assert named
    assert named[0].parameters == ["parts.idle.weight", "parts.idle.bias"]


# Reporting and checkpoints.


def _report(job: Any, folder: str) -> None:
    training = _training(job)
    training.report(folder)
    for step in training.steps(epochs=2):
        for x, y in step:
            loss = F.cross_entropy(training.models[0](x), y, reduction="sum")
            step.backward(loss, count=len(y))
        step.update(clip_norm=1.0)
        training.log(loss=step.loss, norm=step.grad_norm)


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_log_has_one_line_a_step_with_the_loss_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = []
    for nproc, backend in ((1, "shm"), (2, "shm"), (3, "shm"), (2, "gloo")):
        monkeypatch.setenv("PACELINE_BACKEND", backend)
        folder = tmp_path / f"{nproc} {backend}"
        run_ranks(_report, str(folder), nproc=nproc)
        logs.append(_lines(folder))
    for lines in logs:
        assert [line["step"] for line in lines] == list(range(1, 9))
        assert [line["epoch"] for line in lines] == [0] * 4 + [1] * 4
        for name in ("loss", "norm"):
            assert [line[name] for line in lines] == pytest.approx(
                [line[name] for line in logs[0]], rel=1e-4
            )


def _resumed(job: Any, folder: str, first: int, resume: str) -> tuple[list[float], list[float]]:
    checkpoints = paceline.Checkpoints(folder, every_steps=2, resume=resume)
    training = _training(job, schedule=lambda s: 1 / (1 + s), checkpoints=checkpoints)
    training.report(folder)
    losses = _run(training, until=first)
    return losses, _weights(training).tolist()


@pytest.mark.parametrize("nproc", [1, *[pytest.param(n, marks=SLOW) for n in (2, 3)], 4])
def test_a_resumed_training_ends_bit_for_bit_where_a_straight_one_ends(
    nproc: int, tmp_path: Path
) -> None:
    straight = run_ranks(_resumed, str(tmp_path / "a"), 9, "auto", nproc=nproc)
    run_ranks(_resumed, str(tmp_path / "b"), 4, "auto", nproc=nproc)
    resumed = run_ranks(_resumed, str(tmp_path / "b"), 9, "auto", nproc=nproc)
    for rank in range(nproc):
        assert resumed[rank][0] == straight[rank][0][4:]
        assert resumed[rank][1] == straight[rank][1]


def test_a_training_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    straight = run_ranks(_resumed, str(tmp_path / "a"), 9, "auto", nproc=1)[0]
    for nproc, until in ((2, 3), (1, 5), (3, 9)):
        resumed = run_ranks(_resumed, str(tmp_path / "b"), until, "auto", nproc=nproc)[0]
    assert resumed[1] == pytest.approx(straight[1], rel=1e-4)


def test_resume_never_starts_anew_and_keeps_what_was_there(tmp_path: Path) -> None:
    folder = str(tmp_path)
    first = run_ranks(_resumed, folder, 4, "auto", nproc=2)[0]
    again = run_ranks(_resumed, folder, 4, "never", nproc=2)[0]
    assert again == first
    assert (tmp_path / "before-1" / "step-4" / "manifest.json").exists()


def test_the_final_weights_load_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "out" / "model.pth"
    first, second = run_ranks(_export, str(path), nproc=2)
    model = _model()
    # The model's own names, without "module."
    model.load_state_dict(torch.load(path, weights_only=True))
    assert [p.tolist() for p in model.parameters()] == first == second


def _export(job: Any, path: str) -> list[Any]:
    training = _training(job)
    _run(training, epochs=1)
    training.export(path)
    return [p.tolist() for p in training.models[0].parameters()]
