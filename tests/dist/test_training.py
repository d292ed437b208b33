"""The loop: what it computes on any number of ranks, what it logs and saves, and what it refuses."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Callable
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
    run_loop,
    small_net,
    small_training,
    weights_of,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import CheckpointError, ConfigError, DataError, PeerFailed, StepError
from paceline.testing import digest, run_failing_ranks, run_ranks

# What must be the same for any number of ranks.


def _rates(job: Any) -> list[float]:
    training = small_training(job, schedule=lambda step: 1 / (1 + step))
    rates = []
    for step in training.steps(epochs=1):
        backwards(training, step)
        rates.append(training.optimizers[0].param_groups[0]["lr"])
        step.update()
    return rates


def _collectives_per_step(job: Any, micro_batch: int) -> list[int]:
    counted: list[int] = []
    training = small_training(job, micro_batch=micro_batch)

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
    training = small_training(job, small_net().double(), global_batch=7)
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
    training = small_training(job, small_net().double(), global_batch=2, micro_batch=1)
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
    training = small_training(job, net, samples=20)  # the last step has 2
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
        training = small_training(job)
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
        "dropout": run_loop(small_training(job, dropout=0.5, micro_batch=1), epochs=2),
        "gan": _gan(job),
        "loss before update": _loss_before_update(job),
        "step.run": _loop_and_run(job),
        "padding": _padding(job),
    }
    for precision in ("fp32", "bf16", "fp16"):
        losses = run_loop(small_training(job, precision=precision), epochs=3)
        assert not torch.is_autocast_enabled("cpu")
        found[precision] = [sum(losses[:4]), sum(losses[-4:])]
        few = small_training(job, global_batch=2, precision=precision)
        found[f"{precision} with fewer samples than ranks"] = run_loop(few, until=4)
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


def _losses_read(job: Any) -> list[list[float]]:
    """The loss read twice in a step, in later steps, and after the loop."""
    training = small_training(job, micro_batch=2, samples=16)
    in_a_step = []
    for step in training.steps(epochs=1):
        first = None
        for batch in step:
            step.backward(loss_sum(training.models[0], batch), count=len(batch[1]), reduction="sum")
            first = float(step.loss) if first is None else first
        step.update()
        in_a_step.append(first != float(step.loss))
    training = small_training(job)
    losses, found = [], []
    for step in training.steps(until=3):
        backwards(training, step)
        step.update()
        losses.append(step.loss)
        if step.number == 2:
            found += [float(losses[0]), float(step.loss)]
    return [in_a_step, [*found, float(losses[0]), float(losses[2])]]


@pytest.mark.parametrize("nproc", [1, 2])
def test_the_loss_may_be_read_again_in_a_step_and_after_the_loop(nproc: int) -> None:
    each = run_ranks(_losses_read, nproc=nproc)
    assert all(own == each[0] for own in each)
    in_a_step, (first, _, again, last) = each[0]
    assert any(in_a_step)
    assert again == first != last


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


def test_losses_of_models_in_half_precision_are_added_in_float32() -> None:
    with paceline.join() as job:
        found = [_half(job, torch.bfloat16, "sum"), _half(job, torch.float16, "mean")]
    # each loss is ln 2 in 8 or 11 bits
    assert found == pytest.approx([math.log(2), 8 + math.log(2)], rel=4e-3)


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


# Wrong use.


def _mean(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, y)


def _sum(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, y, reduction="sum")


def _wrong_step(
    job: Any,
    loss: Callable[[torch.Tensor, torch.Tensor], Any] = _sum,
    *,
    count: str = "samples",
    num: Callable[[torch.Tensor], Any] = len,
    reduction: Any = "sum",
    backwards: int = 1,
    leaves: bool = False,
) -> None:
    """One step, whose inner loop ends after the first micro-batch if `leaves`; `num` counts the targets."""
    training = small_training(job, count=count)
    for step in training.steps(until=1):
        for x, y in step:
            for _ in range(backwards):
                value = loss(training.models[0](x), y)
                step.backward(value, count=num(y), reduction=reduction)
            if leaves:
                break
        step.update()


def _wrong_run(job: Any, loss: Callable[..., Any], **options: Any) -> None:
    training = small_training(job, **options)
    for step in training.steps(until=1):
        step.run(partial(loss, training.models[0]))


def _late_reduction(job: Any) -> None:
    training = small_training(job)
    for step in training.steps(until=5):
        for batch in step:
            loss = loss_sum(training.models[0], batch)
            how: Any = "median" if step.number > 3 else "sum"
            step.backward(loss, count=len(batch[1]), reduction=how)
        step.update()


def _no_update(job: Any) -> None:
    training = small_training(job)
    for step in training.steps(until=1):
        backwards(training, step)


def _earlier_loss(job: Any) -> None:
    training = small_training(job)
    losses = []
    for step in training.steps(until=2):
        backwards(training, step)
        step.update()
        losses.append(step.loss)
        training.log(previous=losses[0])


def _report_in_the_loop(job: Any) -> None:
    training = small_training(job)
    for _ in training.steps(until=1):
        training.report(progress=False)


def _wrong_parts(job: Any, **given: Any) -> None:
    """A training of the usual parts, some of them replaced."""
    net = small_net()
    parts: dict[str, Any] = {
        "model": paceline.ddp(job, net),
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "batches": paceline.Batches(job, make_data(), global_batch=6),
    }
    if given.pop("optimizer twice", False):
        given["optimizer"] = [parts["optimizer"]] * 2
    paceline.Training(job, **(parts | given))


_class_weights = partial(F.cross_entropy, weight=torch.arange(1.0, 4.0))
_WRONG: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a mean as a sum": ("StepError", lambda job: _wrong_step(job, _mean)),
    "a mean of tokens as a sum": (
        "StepError",
        lambda job: _wrong_step(job, _mean, count="tokens", num=lambda y: (y >= 0).sum()),
    ),
    "class weights": ("StepError", lambda job: _wrong_step(job, _class_weights, reduction=None)),
    "another reduction": ("StepError", lambda job: _wrong_step(job, reduction="median")),
    "another reduction later": ("StepError", _late_reduction),
    "tokens without a count": (
        "StepError",
        lambda job: _wrong_step(job, _mean, count="tokens", num=lambda y: None, reduction=None),
    ),
    "a vector": (
        "StepError",
        lambda job: _wrong_step(job, partial(F.cross_entropy, reduction="none")),
    ),
    "a constant": ("StepError", lambda job: _wrong_step(job, lambda out, y: out.sum().detach())),
    "another count": ("StepError", lambda job: _wrong_step(job, num=lambda y: len(y) + 1)),
    "a vector as count": (
        "StepError",
        lambda job: _wrong_step(job, num=lambda y: torch.tensor([len(y), len(y)])),
    ),
    "negative tokens": (
        "StepError",
        lambda job: _wrong_step(job, count="tokens", num=lambda y: -1),
    ),
    "zero tokens": ("StepError", lambda job: _wrong_step(job, count="tokens", num=lambda y: 0)),
    "no backward": ("StepError", lambda job: _wrong_step(job, backwards=0)),
    "two backwards": ("StepError", lambda job: _wrong_step(job, backwards=2)),
    "inner break": ("StepError", lambda job: _wrong_step(job, leaves=True)),
    "no update": ("StepError", _no_update),
    "run without a count of tokens": (
        "StepError",
        lambda job: _wrong_run(job, loss_sum, count="tokens"),
    ),
    "run that returns three": (
        "StepError",
        lambda job: _wrong_run(job, lambda model, batch: (loss_sum(model, batch), 1, 2)),
    ),
    "log of an earlier loss": ("ConfigError", _earlier_loss),
    "report in the loop": ("StepError", _report_in_the_loop),
    "flops": ("ConfigError", lambda job: small_training(job).report(flops="3")),  # type: ignore[arg-type]
    "frozen": (
        "ConfigError",
        lambda job: _wrong_parts(job, model=small_net().requires_grad_(False)),
    ),
    "not wrapped": ("ConfigError", lambda job: _wrong_parts(job, model=small_net())),
    "text as model": ("ConfigError", lambda job: _wrong_parts(job, model="adam")),
    "text as optimizer": ("ConfigError", lambda job: _wrong_parts(job, optimizer="adam")),
    "dataset as batches": ("ConfigError", lambda job: _wrong_parts(job, batches=make_data())),
    "no model": ("ConfigError", lambda job: _wrong_parts(job, model=[])),
    "no optimizer": ("ConfigError", lambda job: _wrong_parts(job, optimizer=[])),
    "optimizer twice": ("ConfigError", lambda job: _wrong_parts(job, **{"optimizer twice": True})),
}


def _refuse(job: Any, kind: str) -> None:
    _WRONG[kind][1](job)


@pytest.mark.ci
def test_wrong_use_is_refused_on_every_rank() -> None:
    for found in run_ranks(refusals, _refuse, list(_WRONG), nproc=2):
        errors = {kind: name for kind, (name, _) in found.items()}
        assert errors == {kind: name for kind, (name, _) in _WRONG.items()}
        assert "after 1 of 2 micro-batches" in found["inner break"][1]


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
    training = small_training(job, net, global_batch=4)
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
    "kind",
    [
        "unfreeze",
        "unused on rank 1",
        *[
            pytest.param(kind, marks=pytest.mark.ci)
            for kind in ("wrap again", "freeze", "unused", "add")
        ],
    ],
)
def test_parameters_that_change_between_steps_are_named_at_once(kind: str) -> None:
    outcomes = run_failing_ranks(_change, kind, nproc=3)
    named = [o.error for o in outcomes if isinstance(o.error, StepError)]
    assert named, outcomes[0].text
    assert all(isinstance(o.error, (StepError, PeerFailed)) for o in outcomes)
    assert any("aside" in p or "extra" in p for p in named[0].parameters)
    assert "step 5" in str(named[0])


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
        training = small_training(job)
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
        training = small_training(job, count="tokens")
        monkeypatch.setattr("paceline.errors.socket.gethostname", _forbidden)
        assert len(run_loop(training, until=3)) == 3


# Reporting and checkpoints.


def _report(job: Any, folder: str) -> None:
    training = small_training(job)
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


def _saves_by_clock(job: Any, folder: str) -> list[str]:
    checkpoints = paceline.Checkpoints(folder, every_s=1e6, keep=9)
    training = small_training(job, checkpoints=checkpoints)
    checkpoints._last_begun -= 2e6  # due until the first save
    run_loop(training, until=9)
    return sorted(path.name for path in Path(folder).glob("step-*"))


def test_a_save_by_the_clock_happens_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_BACKEND", "gloo")
    for saved in run_ranks(_saves_by_clock, str(tmp_path), nproc=2):
        assert saved == ["step-2", "step-9"], "requested after step 1, and the last step"


def test_a_resume_that_failed_is_not_taken_as_done(tmp_path: Path) -> None:
    with paceline.join() as job:
        run_loop(small_training(job, checkpoints=paceline.Checkpoints(tmp_path)), until=1)
        other = nn.Sequential(nn.Linear(4, 3))
        training = small_training(job, other, checkpoints=paceline.Checkpoints(tmp_path))
        texts = []
        for _ in range(2):
            with pytest.raises(CheckpointError) as raised:
                run_loop(training, until=3)
            texts.append(str(raised.value))
    assert texts[0] == texts[1]


def test_keep_refuses_a_second_object_under_a_name_and_one_that_comes_late() -> None:
    with paceline.join() as job:
        training = small_training(job)
        ema = small_net()
        training.keep(ema=ema)
        training.keep(ema=ema)
        with pytest.raises(ConfigError, match="another object is kept under this name"):
            training.keep(ema=small_net())
        run_loop(training, until=1)
        with pytest.raises(StepError, match=r"before training\.steps"):
            training.keep(late=ema)


def _load_an_earlier_step(job: Any, folder: str) -> list[int]:
    first = small_training(job, checkpoints=paceline.Checkpoints(f"{folder}/first"))
    run_loop(first, until=1)
    saved = first.state_dict()
    run_loop(first, until=3)
    training = small_training(job, checkpoints=paceline.Checkpoints(f"{folder}/other"))
    training.load_state_dict(saved)
    with pytest.raises(StepError, match="after the training had resumed"):
        training.keep(late=small_net())
    numbers = []
    for step in training.steps(until=3):
        backwards(training, step)
        step.update()
        numbers.append(step.number)
    return numbers


def test_steps_continue_from_a_state_that_was_loaded_explicitly(tmp_path: Path) -> None:
    for numbers in run_ranks(_load_an_earlier_step, str(tmp_path), nproc=2):
        assert numbers == [2, 3]


def _resumed(job: Any, folder: str, until: int) -> Any:
    checkpoints = paceline.Checkpoints(folder, every_steps=2)
    training = small_training(job, schedule=lambda s: 1 / (1 + s), checkpoints=checkpoints)
    losses = run_loop(training, until=until)
    training.export(f"{folder}/out/model.pth")
    return losses, weights_of(*training.models)


def test_a_resumed_training_ends_bit_for_bit_where_a_straight_one_ends(tmp_path: Path) -> None:
    straight = run_ranks(_resumed, str(tmp_path / "a"), 9, nproc=4)
    run_ranks(_resumed, str(tmp_path / "b"), 4, nproc=4)
    resumed = run_ranks(_resumed, str(tmp_path / "b"), 9, nproc=4)
    for own, whole in zip(resumed, straight, strict=True):
        assert own[0] == whole[0][4:]
        assert own[1] == whole[1]
    model = small_net()  # the file has the model's own names, without "module."
    model.load_state_dict(torch.load(tmp_path / "b/out/model.pth", weights_only=True))
    assert weights_of(model) == resumed[0][1]


@pytest.mark.ci
def test_the_number_of_ranks_may_change_and_nothing_saved_is_lost(tmp_path: Path) -> None:
    straight = run_ranks(_resumed, str(tmp_path / "a"), 9, nproc=1)[0]
    for nproc, until in ((2, 3), (1, 5), (3, 9)):
        resumed = run_ranks(_resumed, str(tmp_path / "b"), until, nproc=nproc)[0]
    assert resumed[1] == pytest.approx(straight[1], rel=1e-4)
