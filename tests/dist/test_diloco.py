"""`diloco`: hosts that train apart and average their weights."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainings import (
    assert_close,
    check_messages,
    loss_sum,
    make_data,
    make_training,
    refusals,
    small_net,
    train,
)
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Mesh
from paceline.errors import ConfigError
from paceline.testing import run_ranks

AVERAGE = {"every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def _averaged(job: Any, wrap: Any = None) -> Any:
    model = paceline.diloco(job, small_net(), **AVERAGE, wrap=wrap)
    return train(make_training(job, model, make_data(), global_batch=7, micro_batch=2), until=6)


@pytest.mark.parametrize(
    ("mesh", "wrap"),
    [
        (Mesh(dp_replicate=2), None),
        (Mesh(dp_replicate=2, dp_shard=2), paceline.fsdp),
        pytest.param(
            Mesh(dp_replicate=2),
            functools.partial(paceline.fsdp, param_dtype=torch.float32),
            marks=pytest.mark.ci,
        ),
    ],
    ids=["2 hosts", "2x2 FSDP", "FSDP of one rank"],
)
def test_averaging_after_each_step_of_sgd_is_synchronous_training(mesh: Mesh, wrap: Any) -> None:
    """Hosts get 3 and 4 of 7 samples, and 1 sample in the last step of an epoch."""
    [one] = run_ranks(_averaged, nproc=1)
    for rank in run_ranks(_averaged, wrap, nproc=mesh.data_size, mesh=mesh):
        assert_close(rank, one, 1e-5)


def _on_uneven_hosts(job: Any) -> Any:
    """One host has one rank, the other two."""
    job.local_rank = (0, 0, 1)[job.rank]
    with pytest.raises(ConfigError, match="different numbers of ranks"):
        paceline.diloco(job, small_net(), every=1, wrap=paceline.fsdp)
    return _averaged(job)


@pytest.mark.ci
def test_hosts_of_different_sizes_average_whole_models_only() -> None:
    [one] = run_ranks(_averaged, nproc=1)
    for rank in run_ranks(_on_uneven_hosts, nproc=3):
        assert_close(rank, one, 1e-5)


def _train(
    job: Any, folder: str | None, stop: int | None, options: dict[str, Any], until: int = 10
) -> Any:
    """The weights of this host and the outer ones.

    With `stop`, the loop is left in this step, and a validation loop is left open in the step before.
    """
    wrap = functools.partial(paceline.fsdp, blocks=nn.Linear)
    sharded = job.mesh is not None and job.mesh.dp_shard > 1
    model = paceline.diloco(job, small_net(), wrap=wrap if sharded else None, **options)
    training = make_training(job, model, make_data(), optimizer=adam, folder=folder, global_batch=7)
    for step in training.steps(until=until):
        step.run(lambda batch: loss_sum(model, batch), reduction="sum")
        step.update(clip_norm=1.0)
        if step.number == stop:
            break
        if stop and step.number == stop - 1 and not sharded:
            job.left_open = paceline.parts(job, model, make_data(), micro_batch=2)
            next(job.left_open)
    outer = training._context.strategy.whole_state(model)
    own = {
        name: p.detach().full_tensor() if sharded else p.detach()
        for name, p in model.named_parameters()
    }
    return {n: v.clone() for n, v in own.items()}, {n: v.clone() for n, v in outer}


def _by_hand(every: int, lr: float, momentum: float, steps: int) -> dict[str, torch.Tensor]:
    """DiLoCo of two hosts in one process."""
    outer = small_net()
    velocity = [torch.zeros_like(p) for p in outer.parameters()]
    hosts = [small_net() for _ in range(2)]
    optimizers = [adam(host.parameters()) for host in hosts]
    data = make_data(21)
    for step in range(steps):
        ids = list(range(step * 7, step * 7 + 7))
        for own, host, optimizer in zip((ids[:3], ids[3:]), hosts, optimizers, strict=True):
            optimizer.zero_grad()
            (loss_sum(host, data[own]) / len(own)).backward()
            nn.utils.clip_grad_norm_(host.parameters(), 1.0)
            optimizer.step()
        if (step + 1) % every == 0 or step + 1 == steps:
            with torch.no_grad():
                for v, p, a, b in zip(
                    velocity, outer.parameters(), *(h.parameters() for h in hosts), strict=True
                ):
                    gradient = (3 * (p - a) + 4 * (p - b)) / 7
                    v.mul_(momentum).add_(gradient)
                    p.sub_(lr * (gradient + momentum * v))
                    a.copy_(p)
                    b.copy_(p)
    return {name: p.detach() for name, p in outer.named_parameters()}


def _train_in_order(job: Any, options: dict[str, Any]) -> Any:
    model = paceline.diloco(job, small_net(), **options)
    batches = paceline.Batches(job, make_data(21), global_batch=7, shuffle=False)
    training = paceline.Training(job, model, adam(model.parameters()), batches)
    for step in training.steps(until=3):
        step.run(lambda batch: loss_sum(model, batch), reduction="sum")
        step.update(clip_norm=1.0)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        pytest.param("fp32", 1e-6, marks=pytest.mark.ci),
        pytest.param("bf16", 4e-4, marks=pytest.mark.ci),
        ("int8", 4e-4),
    ],
)
def test_two_hosts_train_as_the_paper_says(dtype: str, tolerance: float) -> None:
    options = {"every": 2, "outer_lr": 0.7, "outer_momentum": 0.9, "outer_dtype": dtype}
    want = _by_hand(2, 0.7, 0.9, 3)
    ranks = run_ranks(_train_in_order, options, nproc=2, mesh=Mesh(dp_replicate=2))
    for name, value in ranks[0].items():
        assert torch.equal(value, ranks[1][name])
        assert (value - want[name]).abs().max() < tolerance, name


KINDS: dict[str, dict[str, Any]] = {
    "whole": {"every": 4},
    "fragments": {"every": 4, "fragments": 2, "outer_dtype": "int8"},
}


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        pytest.param("whole", Mesh(dp_replicate=2), marks=pytest.mark.ci),
        ("fragments", Mesh(dp_replicate=2)),
        pytest.param("fragments", Mesh(dp_replicate=2, dp_shard=2), marks=pytest.mark.ci),
    ],
    ids=["whole", "fragments", "fragments FSDP"],
)
def test_a_restart_inside_a_round_continues_bit_for_bit(
    tmp_path: Path, kind: str, mesh: Mesh
) -> None:
    """It resumes from step 6, between two outer steps, and with fragments while one is exchanged."""
    nproc, options, folders = mesh.data_size, KINDS[kind], [f"{tmp_path}/a", f"{tmp_path}/b"]
    want = run_ranks(_train, folders[0], None, options, nproc=nproc, mesh=mesh)
    stopped = run_ranks(_train, folders[1], 7, options, nproc=nproc, mesh=mesh)
    got = run_ranks(_train, folders[1], None, options, nproc=nproc, mesh=mesh)
    first, last = stopped[0], stopped[-1]
    assert any(not torch.equal(first[0][name], last[0][name]) for name in first[0])
    assert all(torch.equal(first[1][name], last[1][name]) for name in first[1])
    for a, b in zip(want, got, strict=True):
        for name, value in a[0].items():
            assert torch.equal(value, b[0][name]), name
            assert torch.equal(value, want[0][1][name]), name  # at the end all hosts are equal


@pytest.mark.ci
def test_on_another_number_of_hosts_all_begin_with_the_outer_weights(tmp_path: Path) -> None:
    folder, options = str(tmp_path), {"every": 4}
    three = run_ranks(_train, folder, 7, options, nproc=3, mesh=Mesh(dp_replicate=3))
    ranks = run_ranks(_resumed, folder, options, nproc=2, mesh=Mesh(dp_replicate=2))
    for own, number, loss in ranks:
        assert number == 6
        assert loss == ranks[0][2]
        for name, value in three[0][1].items():
            assert torch.equal(own[name], value), name


def _resumed(job: Any, folder: str, options: dict[str, Any]) -> Any:
    """The weights after a resume; the step; the loss of the outer weights."""
    model = paceline.diloco(job, small_net(), **options)
    training = make_training(job, model, make_data(), optimizer=adam, folder=folder, global_batch=7)
    training.resume()
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss = paceline.evaluate(
        job, model, make_data(), lambda m, b: {"loss": (loss_sum(m, b), len(b[1]))}
    )
    return own, training.number, loss.loss


def _losses_within_a_round(job: Any) -> Any:
    model = paceline.diloco(job, small_net(), every=4)
    training = make_training(job, model, make_data(), optimizer=adam, global_batch=7)
    found, data = [], make_data()
    for step in training.steps(until=6):
        step.run(lambda batch: loss_sum(model, batch), reduction="sum")
        step.update()
        with torch.no_grad():
            own = float(loss_sum(model, data[:]))
        shared = paceline.evaluate(job, model, data, lambda m, b: {"all": (loss_sum(m, b), 1)})
        found.append((own, shared["all"]))
    return found


def test_evaluation_uses_the_outer_weights() -> None:
    first, second = run_ranks(_losses_within_a_round, nproc=2, mesh=Mesh(dp_replicate=2))
    assert [b for _, b in first] == [b for _, b in second]
    assert len({b for _, b in first}) == 2  # they change in step 4
    for at in (0, 1, 2, 4):
        assert first[at][0] != second[at][0], "between outer steps hosts have weights of their own"
    for at in (3,):
        assert first[at][0] == second[at][0]


def _lone_host(job: Any) -> Any:
    """Without other hosts the outer steps are taken too."""
    model = paceline.diloco(job, small_net(), every=2, outer_lr=0.5, outer_momentum=0.0)
    plain = small_net()
    start = [p.detach().clone() for p in plain.parameters()]
    for net in (model, plain):
        wrapped = net if net is model else paceline.ddp(job, net)
        training = make_training(job, wrapped, make_data(), global_batch=7)
        train(training, until=2)
    return [
        float((p - (s + q) / 2).abs().max())
        for p, q, s in zip(model.parameters(), plain.parameters(), start, strict=True)
    ]


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.ci)])
def test_one_host(nproc: int) -> None:
    for rank in run_ranks(_lone_host, nproc=nproc):
        assert max(rank) < 1e-6


def _refused(job: Any, kind: str) -> None:
    def wrap(**options: Any) -> nn.Module:
        return paceline.diloco(job, small_net(), **({"every": 2} | options))

    options: dict[str, dict[str, Any]] = {
        "every": {"every": 0},
        "momentum": {"outer_momentum": 1.0},
        "learning rate": {"outer_lr": 0.0},
        "dtype": {"outer_dtype": "int4"},
        "fragments": {"fragments": 3},
    }
    if kind in options:
        wrap(**options[kind])
    elif kind == "disagreement":
        wrap(every=2 + job.rank)
    elif kind == "wrapped":
        paceline.diloco(job, paceline.ddp(job, small_net()), every=2)
    elif kind == "twice":
        paceline.diloco(job, wrap(), every=2)
    elif kind == "complex":
        paceline.diloco(job, nn.Linear(2, 2, dtype=torch.complex64), every=2)
    elif kind == "syncbn":
        net = paceline.sync_batchnorm(job, nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
        make_training(job, paceline.diloco(job, net, every=2), make_data())
    elif kind == "unfrozen later":
        net = small_net()
        net[0].requires_grad_(False)
        model = paceline.diloco(job, net, every=2)
        net[0].requires_grad_(True)
        make_training(job, model, make_data())
    elif kind == "frozen when saved":
        net = small_net()
        net[0].requires_grad_(False)
        before = make_training(job, paceline.diloco(job, net, every=2), make_data())
        make_training(job, wrap(), make_data()).load_state_dict(before.state_dict())
    elif kind == "auto":
        batches = paceline.Batches(job, make_data(), global_batch=4, micro_batch="auto")
        model = wrap()
        paceline.Training(job, model, adam(model.parameters()), batches)
    elif kind == "reproducible":
        make_training(job, wrap(), make_data(), reproducible=True)
    elif kind == "recheck":
        make_training(job, wrap(), make_data(), recheck_every=5)


def _all_refused(job: Any) -> dict[str, tuple[str, str]]:
    kinds = ["every", "momentum", "learning rate", "dtype", "fragments", "disagreement", "wrapped"]
    kinds += [
        "twice",
        "complex",
        "syncbn",
        "unfrozen later",
        "frozen when saved",
        "auto",
        "reproducible",
    ]
    kinds += ["recheck"]
    return refusals(job, _refused, kinds)


def test_what_cannot_work_is_refused_on_all_ranks() -> None:
    check_messages("diloco", run_ranks(_all_refused, nproc=2, mesh=Mesh(dp_replicate=2)))


def _left_open(job: Any) -> Any:
    """Weights of this host after validation loops that were left, and stay open, also in the last step."""
    found = []
    for leaves in (False, True):
        model = paceline.diloco(job, small_net(), every=4)
        training = make_training(job, model, make_data(), optimizer=adam, global_batch=7)
        for step in training.steps(until=3):
            step.run(lambda batch, model=model: loss_sum(model, batch), reduction="sum")
            step.update()
            if leaves and step.number >= 2:
                job.left_open = paceline.parts(job, model, make_data(), micro_batch=2)
                next(job.left_open)
        job.left_open = None
        found.append([p.detach().clone() for p in model.parameters()])
        # A state that was not merged over hosts loads on its own host.
        training.load_state_dict(training.state_dict())
    return [bool(torch.equal(a, b)) for a, b in zip(*found, strict=True)]


def test_a_validation_loop_that_is_left_does_not_change_the_training() -> None:
    for rank in run_ranks(_left_open, nproc=2, mesh=Mesh(dp_replicate=2)):
        assert all(rank)


def _drifts(job: Any) -> None:
    model = paceline.diloco(job, small_net(), every=4)
    training = make_training(job, model, make_data(), global_batch=7, desync_every=2)
    for step in training.steps(until=4):
        step.run(lambda batch: loss_sum(model, batch), reduction="sum")
        step.update()
        if step.number == 2 and job.rank == 1:
            training._context.strategy._outers[0].fragments[0].weights[0] += 1  # as faulty memory


def test_outer_weights_that_drift_apart_are_found() -> None:
    with pytest.raises(paceline.RankDisagreement, match=r"outer weights 0\.0"):
        run_ranks(_drifts, nproc=2, mesh=Mesh(dp_replicate=2))


def _preempted_in_the_last_step(job: Any) -> Any:
    model = paceline.diloco(job, small_net(), every=4)
    training = make_training(job, model, make_data(), optimizer=adam, global_batch=7)
    number = 0
    try:
        for step in training.steps(until=6):
            step.run(lambda batch: loss_sum(model, batch), reduction="sum")
            if step.number == 6 and job.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            step.update()
    except paceline.Preempted as preempted:
        number = preempted.step
    return number, [p.detach().clone() for p in model.parameters()]


def test_a_preemption_in_the_last_step_brings_the_hosts_together() -> None:
    (number, first), (_, second) = run_ranks(
        _preempted_in_the_last_step, nproc=2, mesh=Mesh(dp_replicate=2)
    )
    assert number == 6
    assert all(map(torch.equal, first, second))


def _begun_with(job: Any, path: str) -> list[dict[str, torch.Tensor]]:
    """Weights after one step that begins with loaded weights: before the training, and after three steps."""
    x, y = make_data(1, torch.bfloat16)[:]
    data, found = TensorDataset(x.expand(4, 4), y.expand(4)), []
    for steps in (0, 3):
        model = paceline.diloco(job, small_net().bfloat16(), every=2)
        training = make_training(job, model, data)
        if steps:
            train(training, until=steps)
        paceline.load_weights(model, path)
        training.export(f"{path}.{steps}")
        found.append(train(training, until=steps + 1).weights)
    return found


@pytest.mark.ci
def test_a_training_begins_with_the_weights_that_were_loaded(tmp_path: Path) -> None:
    loaded = {name: value.bfloat16() + 1 for name, value in small_net().state_dict().items()}
    path = str(tmp_path / "weights.pt")
    torch.save(loaded, path)
    for first, later in run_ranks(_begun_with, path, nproc=2, mesh=Mesh(dp_replicate=2)):
        for name, value in loaded.items():
            assert torch.equal(first[name], later[name]), name
            for steps in (0, 3):
                exported = torch.load(f"{path}.{steps}")[name]
                assert exported.dtype == torch.bfloat16
                assert torch.equal(exported, value), name


def _waits_long(job: Any) -> int:
    job.timeout_s = 1.0
    model = paceline.diloco(job, small_net(), every=2)
    training = make_training(job, model, make_data(), global_batch=7)
    for step in training.steps(until=2):
        step.run(lambda batch: loss_sum(model, batch), reduction="sum")
        time.sleep(2.0 * job.rank * (step.number == 2))
        step.update()
    return int(training.number)


@pytest.mark.ci
def test_an_exchange_may_take_longer_than_other_collectives() -> None:
    assert run_ranks(_waits_long, nproc=2, mesh=Mesh(dp_replicate=2)) == [2, 2]
