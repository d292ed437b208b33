"""Callbacks of `Trainer`: the same on any number of ranks, resumed exactly, and named when they raise."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_trainings import backwards, make_data, refusals, weights_of
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import paceline
from paceline.testing import run_failing_ranks, run_ranks
from paceline.training.callbacks import Callbacks


def _net() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def _trainer(*callbacks: paceline.Callback, rate: float = 0.5, **options: Any) -> paceline.Trainer:
    return paceline.Trainer(
        _net,
        F.cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, lr=rate),
        make_data(26, torch.float64),
        global_batch=8,
        callbacks=callbacks,
        **options,
    )


class Values(paceline.Callback):
    """Puts given values in place of the loss of the evaluations. Comes before the callbacks that read it."""

    def __init__(self, values: list[float]) -> None:
        self.values = values
        self.seen: list[tuple[int, float]] = []

    def on_evaluation_end(self, training: Any, step: Any, evaluation: Any) -> None:
        value = self.values.pop(0)
        evaluation.values["loss"] = value
        self.seen.append((step.number, value))

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def _validation(**every: int) -> paceline.Validation:
    return paceline.Validation(dataset=make_data(26, torch.float64), **every)


def _stop_early(job: Any, folder: str) -> dict[str, Any]:
    losses = [5.0, 4.0, 4.5, 3.95, 4.2, 4.1, 9.0]
    found: dict[str, Any] = {}
    for kind, options in {
        "patience": {"patience": 2},
        "delta": {"patience": 2, "min_delta": 0.1},
        "max": {"patience": 2, "mode": "max"},
        "nan": {"patience": 2},
    }.items():
        own = [math.nan, 5.0, 4.0, math.nan, 4.5] if kind == "nan" else losses
        values, stop = Values(list(own)), paceline.EarlyStopping(**options)
        result = _trainer(values, stop, validation=_validation(every_steps=2)).fit(9)
        found[kind] = (result.steps, [step for step, _ in values.seen], stop.num_bad)
    # Interrupted after the first epoch of 4 steps, in which two evaluations were made.
    found["resumed"] = []
    for epochs in (1, 9, 9):
        values, stop = Values(list(losses)), paceline.EarlyStopping(patience=2, min_delta=0.1)
        best, rates = paceline.BestCheckpoint(), paceline.LearningRateMonitor()
        trainer = _trainer(values, stop, best, rates, validation=_validation(every_steps=2))
        result = trainer.fit(epochs, folder=folder)
        found["resumed"].append((result.steps, values.seen, stop.num_bad))
    return found


@pytest.mark.parametrize("nproc", [1, 3])
def test_early_stopping_ends_at_the_same_step_and_resumes(nproc: int, tmp_path: Path) -> None:
    results = run_ranks(_stop_early, str(tmp_path), nproc=nproc)
    assert all(result == results[0] for result in results)
    # Evaluated after the steps 2, 4, 6, ...
    assert results[0]["patience"] == (12, [2, 4, 6, 8, 10, 12], 2)
    assert results[0]["delta"] == (8, [2, 4, 6, 8], 2)
    assert results[0]["max"] == (6, [2, 4, 6], 2)
    assert results[0]["nan"] == (10, [2, 4, 6, 8, 10], 2)
    # The third start trains no further step.
    assert results[0]["resumed"][1:] == [(8, [(6, 4.5), (8, 3.95)], 2), (8, [], 2)]
    # Each of these had the best loss so far.
    manifests = (tmp_path / "checkpoints").glob("step-*/manifest.json")
    best = {
        json.loads(path.read_text())["step"]
        for path in manifests
        if '"best": true' in path.read_text()
    }
    assert best == {2, 4, 8}
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all("lr" in line for line in lines)
    assert lines[2]["lr"] == 0.5


def _loop(job: Any, folder: str, epochs: int) -> tuple[int, int]:
    """The training of `_trainer` without it; the steps that the checkpoint has, and those at the end."""
    net = _net()
    model = paceline.ddp(job, net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    batches = paceline.Batches(job, make_data(26, torch.float64), global_batch=8)
    checkpoints = paceline.Checkpoints(f"{folder}/checkpoints", every_epochs=1, resume="must")
    training = paceline.Training(job, model, optimizer, batches, checkpoints=checkpoints)
    training.resume()
    before = training.number
    for step in training.steps(epochs=epochs):
        backwards(training, step)
        step.update()
    return before, training.number


def _own_loop(job: Any, folder: str) -> list[Any]:
    model = paceline.ddp(job, _net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = paceline.Batches(job, make_data(26, torch.float64), global_batch=8)
    checkpoints = paceline.Checkpoints(folder)
    training = paceline.Training(job, model, optimizer, batches, checkpoints=checkpoints)
    stopping, best = paceline.EarlyStopping(patience=2), paceline.BestCheckpoint()
    monitor = paceline.LearningRateMonitor()
    training.keep(stopping=stopping, best=best)
    training.report(folder)
    values = iter([4.0, 4.5, 4.2, 3.0])
    saved = []
    for step in training.steps(epochs=9):
        backwards(training, step)
        step.update()
        monitor.on_step_end(training, step)
        if step.number % 3 == 0:  # most are in the middle of an epoch of 4 steps
            evaluation = {"loss": next(values)}
            if best.is_best(evaluation):
                training.save(best=True)
                saved.append(step.number)
            stopping.update(step, evaluation)
    return [training.number, saved]


@pytest.mark.parametrize("nproc", [1, 2])
def test_callbacks_serve_a_loop_too(nproc: int, tmp_path: Path) -> None:
    assert run_ranks(_own_loop, str(tmp_path), nproc=nproc) == [[9, [3]]] * nproc
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["lr"] for line in lines] == [0.5] * 9


def _fits_twice(job: Any, folder: str) -> bool:
    best = paceline.BestCheckpoint("loss")
    trainer = _trainer(best, validation=_validation())
    trainer.fit(1, folder=f"{folder}/a")
    best.best = -1.0  # the first run was far better
    trainer.fit(1, folder=f"{folder}/b")
    return best.state_dict()["best"] > 0


def test_the_best_of_a_run_is_not_compared_with_an_earlier_run(tmp_path: Path) -> None:
    assert run_ranks(_fits_twice, str(tmp_path), nproc=2) == [True, True]


def _take_turns(job: Any, folder: str) -> list[Any]:
    first = paceline.EarlyStopping("loss", patience=9), paceline.BestCheckpoint("loss")
    found: list[Any] = [_trainer(*first, validation=_validation()).fit(1, folder=folder).steps]
    other, same = paceline.EarlyStopping("other", patience=9), paceline.BestCheckpoint("loss")
    trainer = _trainer(other, same, validation=_validation(every_epochs=9))
    found += [trainer.fit(1, folder=folder).steps, other.num_bad]
    found.append(same.state_dict() == first[1].state_dict())
    found += _loop(job, folder, 2)
    found.append(_trainer().fit(3, folder=folder).steps)
    return found


def test_trainers_with_other_callbacks_and_loops_resume_from_each_other(tmp_path: Path) -> None:
    for found in run_ranks(_take_turns, str(tmp_path), nproc=2):
        assert found == [4, 4, 0, True, 4, 8, 12]


class Plateau(paceline.Callback):
    """A scheduler that takes the loss of each evaluation, as docs/howto/trainer.md shows it."""

    def on_fit_start(self, training: paceline.Training) -> None:
        (optimizer,) = training.optimizers
        self.scheduler = ReduceLROnPlateau(optimizer, mode="max", patience=0)
        training.keep(scheduler=self.scheduler)

    def on_evaluation_end(self, training: Any, step: Any, evaluation: Any) -> None:
        self.scheduler.step(evaluation.loss)


def _fit_with_plateau(job: Any, folder: str) -> list[float]:
    class Rates(paceline.Callback):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_epoch_end(self, training: paceline.Training, step: paceline.Step) -> None:
            self.seen.append(training.optimizers[0].param_groups[0]["lr"])

    rates = Rates()
    for epochs in (2, 4):  # resumed after the second epoch
        # The loss falls, so in mode "max" no evaluation is better than the first.
        trainer = _trainer(rates, Plateau(), validation=_validation(), rate=1e-3)
        trainer.fit(epochs, folder=folder)
    return rates.seen


class Unfreeze(paceline.Callback):
    """Freezes the first layer in the first epoch."""

    def on_fit_start(self, training: paceline.Training) -> None:
        paceline.unwrap(training.models[0])[0].requires_grad_(False)

    def on_epoch_end(self, training: paceline.Training, step: paceline.Step) -> None:
        paceline.unwrap(training.models[0])[0].requires_grad_(step.epoch != 1)


def _freeze(job: Any) -> dict[str, list[list[float]]]:
    """The first layer after each of three epochs: frozen, trained, frozen."""

    class First(paceline.Callback):
        def __init__(self) -> None:
            self.seen: list[list[float]] = []

        def on_epoch_end(self, training: paceline.Training, step: paceline.Step) -> None:
            self.seen.append(weights_of(paceline.unwrap(training.models[0])[0]))

    found = {}
    for name, options in {
        "find_unused": {"strategy": partial(paceline.ddp, find_unused=True)},
        "reproducible": {"reproducible": True, "strategy": partial(paceline.ddp, find_unused=True)},
    }.items():
        first = First()
        _trainer(Unfreeze(), first, **options).fit(3)
        found[name] = [weights_of(_net()[0]), *first.seen]
    return found


def _fit_frozen(job: Any, kind: str) -> None:
    _trainer(Unfreeze()).fit(2)


def _frozen_and_plateau(job: Any, folder: str) -> Any:
    refused = refusals(job, _fit_frozen, ["frozen"])
    return _freeze(job), _fit_with_plateau(job, folder), refused


@pytest.mark.parametrize("nproc", [1, 3])
def test_layers_are_frozen_between_epochs_and_plateaus_get_the_evaluation(
    nproc: int, tmp_path: Path
) -> None:
    want = run_ranks(_freeze, nproc=1)[0]
    for found, rates, refused in run_ranks(_frozen_and_plateau, str(tmp_path), nproc=nproc):
        for name, (start, frozen, trained, again) in found.items():
            assert start == frozen != trained == again
            exact = name == "reproducible"
            assert trained == (want[name][2] if exact else pytest.approx(want[name][2], rel=1e-9))
        assert rates == pytest.approx([1e-3, 1e-3, 1e-4, 1e-5])
        if nproc > 1:  # plain DDP waits for the gradients of frozen parameters
            assert refused["frozen"][0] == "StepError"
            assert "find_unused=True" in refused["frozen"][1]


class Broken(paceline.Callback):
    def on_step_end(self, training: paceline.Training, step: paceline.Step) -> None:
        if training.job.rank == 1 and step.number == 6:
            raise KeyError("no such table")


def _raise(job: Any, folder: str) -> None:
    _trainer(Broken()).fit(3, folder=folder)


def _resume(job: Any, folder: str) -> int:
    return _trainer().fit(3, folder=folder).steps


def test_a_callback_that_raises_is_named_on_all_ranks(tmp_path: Path) -> None:
    outcomes = run_failing_ranks(_raise, str(tmp_path), nproc=3)
    assert isinstance(outcomes[1].error, KeyError)
    assert "Broken" in outcomes[1].text or "on_step_end" in outcomes[1].text
    for rank, outcome in enumerate(outcomes):
        if rank != 1:
            assert isinstance(outcome.error, paceline.PeerFailed), outcome.text
            assert "rank 1 failed first: KeyError: 'no such table'" in str(outcome.error)
    # The checkpoint of the first epoch is whole, and the resumed run needs no callback.
    assert run_ranks(_resume, str(tmp_path), nproc=2) == [12, 12]


def _wrong(job: Any, kind: str) -> None:
    callback: dict[str, Any] = {
        "patience": lambda: paceline.EarlyStopping(patience=0),
        "mode": lambda: paceline.EarlyStopping(mode="least"),  # type: ignore[arg-type]
        "delta": lambda: paceline.BestCheckpoint(min_delta=-1.0),
        "metric": lambda: paceline.EarlyStopping("accuracy"),
        "folder": paceline.BestCheckpoint,
        "two": lambda: (paceline.BestCheckpoint("a"), paceline.BestCheckpoint("b")),
    }
    made = callback[kind]()
    _trainer(*(made if kind == "two" else [made]), validation=_validation()).fit(1)


def _wrong_uses(job: Any) -> dict[str, Any]:
    return refusals(job, _wrong, ["patience", "mode", "delta", "metric", "folder", "two"])


def test_wrong_options_are_refused_on_all_ranks() -> None:
    with pytest.raises(paceline.ConfigError, match="cannot be combined"):
        _validation(every_epochs=1, every_steps=1)
    for found in run_ranks(_wrong_uses, nproc=2):
        assert {name for name, _ in found.values()} == {"ConfigError"}
        assert len(found) == 6
        assert "two BestCheckpoints" in found["two"][1]
        assert "has no number 'accuracy'" in found["metric"][1]
        assert "BestCheckpoint needs a folder" in found["folder"][1]


class _Named(paceline.Callback):
    def __init__(self, name: str) -> None:
        self.name = name

    def state_dict(self) -> dict[str, Any]:
        return {"is": id(self)}


def test_every_callback_has_a_name_of_its_own() -> None:
    given = [_Named(name) for name in ("x", "x", "x-2", "x")]
    state = Callbacks(given).state_dict()
    assert list(state) == ["x", "x-2", "x-2-2", "x-3"]
    assert [each["is"] for each in state.values()] == [id(callback) for callback in given]
