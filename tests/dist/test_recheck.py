"""Steps that are computed again: a flipped bit is found, and the rank that has it is named."""

from __future__ import annotations

import gc
import itertools
import socket
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from small_trainings import (
    backwards,
    check_messages,
    make_data,
    make_training,
    record_log,
    refusals,
)
from torch import nn

import paceline
from paceline.errors import RankDisagreement, StepError
from paceline.testing import digest, run_failing_ranks, run_ranks

STEPS = 9  # every third is computed again


def _net(norm: Any = nn.BatchNorm1d) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), norm(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))


def _training(job: Any, *, samples: int = 24, norm: Any = nn.BatchNorm1d, **options: Any) -> Any:
    model = paceline.ddp(job, _net(norm))
    options = {"optimizer": torch.optim.AdamW, "global_batch": 12, "micro_batch": 2, **options}
    return make_training(job, model, make_data(samples), **options)


def _train(job: Any, options: dict[str, Any], fault: dict[str, Any] | None = None) -> Any:
    training = _training(job, **options)
    net = paceline.unwrap(training.models[0])
    layer = _Flips(net[-1], fault) if fault and fault["rank"] == job.rank else None
    losses = []
    for step in training.steps(until=STEPS):
        for batch in step:
            if layer is not None:
                layer.begin(step.number)
            logits = training.models[0](batch[0])
            step.backward(nn.functional.cross_entropy(logits, batch[1]))
        if layer is not None and fault is not None and step.number == fault["step"]:
            layer.after_backward()
        step.update(clip_norm=1.0)
        losses.append(float(step.loss))
    state = [net.state_dict(), training.optimizers[0].state_dict(), torch.get_rng_state()]
    return losses, digest(state)


class _Flips:
    """Flips a bit in a step, once or in each forward."""

    def __init__(self, layer: nn.Linear, fault: dict[str, Any]) -> None:
        self._layer, self._fault = layer, fault
        self._step, self._is_done = 0, False
        layer.register_forward_hook(self._flip_output)

    def begin(self, step: int) -> None:
        self._step = step
        if self._due("weight"):
            _flip(self._layer.weight)

    def _due(self, what: str) -> bool:
        due = self._fault["what"] == what and self._step == self._fault["step"]
        due = due and not (self._is_done and self._fault.get("once", True))
        self._is_done |= due
        return due

    def _flip_output(self, layer: Any, inputs: Any, output: torch.Tensor) -> None:
        if self._due("output"):
            _flip(output)

    def after_backward(self) -> None:
        if self._due("gradient"):
            _flip(self._layer.weight.grad)


def _flip(tensor: Any, bit: int = 20) -> None:
    tensor.detach().view(-1).view(torch.int32)[3] ^= 1 << bit


CI = pytest.mark.ci
CI_1, CI_3 = pytest.param(1, marks=CI), pytest.param(3, marks=CI)
# A rank has other numbers of micro-batches than others, or none.
UNEVEN = {"samples": 22, "norm": nn.LayerNorm, "global_batch": 5}


@pytest.mark.parametrize("nproc", [CI_1, 2, CI_3])
@pytest.mark.parametrize("options", [{}, pytest.param({"reproducible": True}, marks=CI), UNEVEN])
def test_the_result_is_that_of_a_training_without(nproc: int, options: dict[str, Any]) -> None:
    ranks = run_ranks(_train, options | {"recheck_every": 3}, nproc=nproc)
    assert ranks == run_ranks(_train, options, nproc=nproc)


def _other_loops(job: Any, kind: str) -> list[str]:
    """Digests of the weights without `recheck_every`, and with it."""
    found = []
    for every in (None, 2):
        model = paceline.ddp(job, _net(nn.LayerNorm))
        first, *others = model.parameters()
        optimizers = [torch.optim.Adam([first], lr=0.01), torch.optim.SGD(others, lr=0.01)]
        options: dict[str, Any] = {"count": "tokens"} if kind == "tokens" else {}
        if kind in ("fp16", "bf16"):
            options = {"precision": kind}
        batches = paceline.Batches(job, make_data(22), global_batch=5, micro_batch=1)
        training = paceline.Training(
            job, model, optimizers, batches, recheck_every=every, **options
        )
        for step in training.steps(until=7):
            for x, y in step:
                count = 3 if kind == "tokens" else None
                for optimizer in optimizers if kind == "several" else [None]:
                    loss = nn.functional.cross_entropy(model(x), y)
                    if kind == "tokens":
                        loss = loss * 1.0  # so that its weights are not seen
                    step.backward(loss, count=count, optimizer=optimizer)
                if kind == "accuracy":
                    _ = (model(x).argmax(1) == y).float().mean()  # not under torch.no_grad()
            step.update()
        found.append(digest(paceline.unwrap(model).state_dict()))
    return found


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["several", "tokens", "fp16", "bf16", "accuracy"])
@pytest.mark.parametrize("nproc", [1, 2])
def test_other_loops_are_computed_again(kind: str, nproc: int) -> None:
    if kind == "several" and nproc > 1:
        pytest.skip("DDP sums all gradients in one backward")
    for without, rechecked in run_ranks(_other_loops, kind, nproc=nproc):
        assert without == rechecked


FAULTS = [
    # what flips, for how long, the ranks, and what is named
    ("output", True, 1),
    pytest.param("output", True, 2, marks=CI),
    ("output", False, 3),
    pytest.param("weight", True, 3, marks=CI),
    pytest.param("gradient", True, 3, marks=CI),
]


@pytest.mark.parametrize(("what", "once", "nproc"), FAULTS)
def test_a_flipped_bit_is_found_and_its_rank_named(what: str, once: bool, nproc: int) -> None:
    rank = nproc - 1
    fault = {"rank": rank, "step": 6, "what": what, "once": once}
    for outcome in run_failing_ranks(_train, {"recheck_every": 3}, fault, nproc=nproc):
        error = outcome.error
        assert isinstance(error, RankDisagreement)
        assert error.ranks == [rank]
        assert error.step == (5 if what == "weight" else 6)  # the weights are compared as they were
        assert f"host {socket.gethostname()}" in str(error)
        assert error.parameter == "4.weight" if what != "output" else "4.bias"


@CI
def test_two_ranks_cannot_tell_which_one_is_always_wrong() -> None:
    fault = {"rank": 1, "step": 6, "what": "output", "once": False}
    for outcome in run_failing_ranks(_train, {"recheck_every": 3}, fault, nproc=2):
        assert isinstance(outcome.error, RankDisagreement)
        assert outcome.error.ranks is None
        assert "two ranks cannot tell" in str(outcome.error)


def _with_nan(job: Any, kind: str) -> tuple[list[str], tuple[str, str]]:
    """A gradient that becomes infinite in step 2, which is not one that is computed again."""
    texts = record_log()
    training = _training(job, recheck_every=100)
    forwards = 0

    def spoil(layer: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        nonlocal forwards
        forwards += training._step.number == 2
        is_bad = kind == "program" or (job.rank == job.world_size - 1 and forwards == 1)
        return output / 0 if forwards and is_bad else None

    paceline.unwrap(training.models[0])[-1].register_forward_hook(spoil)

    def run(job: Any, kind: str) -> None:
        for step in training.steps(until=5):
            backwards(training, step)
            step.update(clip_norm=1.0)

    refused = refusals(job, run, [kind])[kind]
    return [text for text in texts if "again" in text], refused


@pytest.mark.parametrize("nproc", [1, CI_3])
def test_nan_is_computed_again_once(nproc: int) -> None:
    for texts, (kind, text) in run_ranks(_with_nan, "hardware", nproc=nproc):
        assert kind == "RankDisagreement"
        assert "the gradient of step 2 held NaN or infinity; computed again, it does not" in text
        assert f"memory of rank {nproc - 1} is faulty" in text
        assert not texts
    ranks = run_ranks(_with_nan, "program", nproc=nproc)
    assert [kind for _, (kind, _) in ranks] == ["NonFinite"] * nproc
    (text,) = ranks[0][0]
    assert "comes from the model" in text
    assert ("on other ranks too" in text) == (nproc > 1)


class _Counts(nn.Module):
    """Gives NaN in its fourth forward, which is the second of step 2."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("number", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number.add_(1)
        distance = (self.number - 4).abs()
        return self.layer(x) * (distance / distance)


def _nan_of_a_state(job: Any, kind: str) -> tuple[list[str], int]:
    texts = record_log()
    model = paceline.ddp(job, _Counts() if kind == "buffer" else nn.Linear(4, 3))
    options: dict[str, Any] = {"recheck_every": 100, "on_non_finite": "skip"}
    training = make_training(job, model, make_data(24), global_batch=4, micro_batch=2, **options)
    np.random.seed(0)
    for step in training.steps(until=10):
        for x, y in step:
            # The root of a negative number is NaN. Of these draws one is below 0.03.
            factor = np.sqrt(np.random.rand() - 0.03) if kind == "numpy" else 1.0
            step.backward(factor * nn.functional.cross_entropy(model(x), y))
        step.update()
    return [text for text in texts if "again" in text], training.num_skipped


@CI
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("kind", ["buffer", "numpy"])
def test_nan_is_computed_again_from_the_state_before_its_step(kind: str) -> None:
    ((texts, num_skipped),) = run_ranks(_nan_of_a_state, kind, nproc=1)
    (text,) = texts
    assert "comes from the model" in text
    assert num_skipped >= 1


def _nan_on_one_rank(job: Any) -> None:
    training = _training(job, global_batch=4, recheck_every=100)  # one micro-batch on each rank
    model, is_sound = training.models[0], True
    for step in training.steps(until=5):
        for x, y in step:
            step.backward(nn.functional.cross_entropy(model(x), y))
            if is_sound and job.rank == 1 and step.number == 2:
                is_sound = False
                paceline.unwrap(model)[0].weight.grad[0, 0] = torch.nan  # after its sum over ranks
        step.update()


@CI
def test_a_rank_that_alone_has_nan_after_the_sum_is_named() -> None:
    other, own = (each.error for each in run_failing_ranks(_nan_on_one_rank, nproc=2))
    assert "rank 1" in str(other)
    assert isinstance(own, RankDisagreement)
    assert own.ranks == [1]
    assert own.step == 2
    assert "holds NaN or infinity on rank 1" in str(own)


def _kept_on_one_rank(job: Any) -> None:
    training = _training(job, recheck_every=2)
    model, kept = training.models[0], 1.0
    for step in training.steps(until=4):
        for x, y in step:
            kept += 0.1 * (job.rank == 0)
            step.backward(kept * nn.functional.cross_entropy(model(x), y))
        step.update()


@CI
def test_a_loop_that_keeps_values_on_one_rank_is_not_called_unstable_hardware() -> None:
    for outcome in run_failing_ranks(_kept_on_one_rank, nproc=2):
        assert isinstance(outcome.error, StepError)
        assert "gives other gradients on rank 0" in str(outcome.error)
        assert "values that the loop keeps" in str(outcome.error)


def _sparse(job: Any) -> int:
    model = paceline.ddp(job, nn.Embedding(10, 4, sparse=True))
    data = torch.utils.data.TensorDataset(torch.arange(24) % 10)
    options: dict[str, Any] = {"optimizer": torch.optim.SGD, "recheck_every": 2}
    training = make_training(job, model, data, global_batch=4, micro_batch=2, **options)
    for step in training.steps(until=4):
        for (x,) in step:
            step.backward(model(x).square().mean())
        step.update()
    return training.number


@CI
def test_all_gradients_may_be_sparse() -> None:
    assert run_ranks(_sparse, nproc=1) == [4]


class _RandomData(torch.utils.data.Dataset[Any]):
    """Draws from a generator that nobody seeds."""

    def __init__(self) -> None:
        self._data = make_data(24)
        self._generator = torch.Generator()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        x, y = self._data[index]
        return x + torch.rand((), generator=self._generator), y


class _Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(make_data(24))


def _refused(job: Any, kind: str) -> None:
    options: dict[str, Any] = {"recheck_every": 2}
    data: Any = make_data(24)
    if kind == "auto":
        options["micro_batch"] = "auto"
    elif kind == "stream":
        data = _Stream()
    elif kind == "update":
        options["micro_batch"] = None
    elif kind == "desync_every":
        options["desync_every"] = 0
    elif kind == "negative":
        options["recheck_every"] = 0
    elif kind == "samples":
        data = _RandomData()
    elif kind == "split":
        model = paceline.fsdp(job, _net())
    if kind != "split":
        model = paceline.ddp(job, _net())
    options = {"global_batch": 12, "micro_batch": 4} | options
    training = make_training(job, model, data, **options)
    noise = itertools.count()
    for step in training.steps(until=4):
        for batch in step:
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            if kind == "noise":
                loss = loss * (1 + 0.1 * next(noise))
            step.backward(loss)
            if kind == "update":
                step.update()
        step.update()


REFUSED = ["auto", "stream", "desync_every", "negative", "samples", "noise", "update", "split"]


@pytest.mark.parametrize("nproc", [2])
def test_what_cannot_be_computed_again_is_refused(nproc: int) -> None:
    check_messages("recheck", run_ranks(_all_refused, nproc=nproc))


def _all_refused(job: Any) -> Any:
    return refusals(job, _refused, REFUSED)


def _over_all_ranks(job: Any) -> list[str]:
    texts = record_log()
    options: dict[str, Any] = {"micro_batch": None, "recheck_every": 2}
    training = _training(job, samples=22, norm=nn.LayerNorm, **options)
    model = training.models[0]
    for step in training.steps(until=6):
        step.run(lambda batch: job.all_gather(model(batch[0])).logsumexp(0).mean())
        step.update()
    return [text for text in texts if "recheck_every" in text]


@CI
def test_a_loss_over_all_ranks_is_computed_again_by_its_rank_alone() -> None:
    for texts in run_ranks(_over_all_ranks, nproc=3):
        assert len(texts) == 1
        assert "the loss is over the samples of all ranks" in texts[0]


def _with_workers(job: Any) -> None:
    batches = paceline.Batches(job, make_data(24), global_batch=12, micro_batch=2, workers=1)
    model = paceline.ddp(job, _net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = paceline.Training(job, model, optimizer, batches, recheck_every=2)
    for step in training.steps(until=4):
        backwards(training, step)
        step.update()


@CI
def test_loader_workers_read_samples_again() -> None:
    run_ranks(_with_workers, nproc=2)


def _flip_one(job: Any, case: dict[str, Any]) -> str:
    """Train for a while with a flipped bit: the rank that is named, or a digest of the state."""
    training = _training(job, norm=nn.LayerNorm, recheck_every=EVERY, desync_every=10**6)
    random = Random(case["number"])
    names = [name for name, _ in paceline.unwrap(training.models[0]).named_parameters()]
    model, optimizer = training.models[0], training.optimizers[0]
    p = dict(paceline.unwrap(model).named_parameters())[random.choice(names)]
    element, bit = random.randrange(p.numel()), random.randrange(32)

    def flip(what: str, step: Any) -> None:
        if case["what"] != what or case["rank"] != job.rank or step.number != case["step"]:
            return
        state = optimizer.state[p].get("exp_avg_sq" if bit % 2 else "exp_avg")
        tensor = {"weights": p, "state": state}.get(what, p.grad)
        tensor.detach().view(-1).view(torch.int32)[element] ^= _signed(bit)

    try:
        for step in training.steps(until=3 * EVERY):
            for number, batch in enumerate(step):
                loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
                step.backward(loss)
                if number == 0:
                    flip("local gradient", step)
            flip("gradient", step)
            step.update()
            flip("weights", step)
            flip("state", step)
    except RankDisagreement as error:
        gc.collect()
        job.check_loop_exit()
        return f"{error.ranks}, {error.step <= 2 * EVERY}"
    return digest([paceline.unwrap(model).state_dict(), optimizer.state_dict()])


def _signed(bit: int) -> int:
    return (1 << bit) - (1 << 32 if bit == 31 else 0)


EVERY = 4


def _flip_all(job: Any, cases: list[dict[str, Any]]) -> list[str]:
    return [_flip_one(job, case) for case in cases]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_flipped_bits() -> None:
    cases = [
        {
            "number": number,
            "what": what,
            "rank": number % 3,
            # A gradient before it is summed is seen only while it is computed.
            "step": 2 * EVERY if what == "local gradient" else EVERY + 1 + number % EVERY,
        }
        for number in range(25)
        for what in ("local gradient", "gradient", "weights", "state")
    ]
    sound = {"number": 0, "what": "", "rank": 0, "step": 0}
    reference, *found = run_ranks(_flip_all, [sound, *cases], nproc=3, deadline_s=800)[0]
    # A low bit may be lost by the next rounding: then the weights are those of a sound run.
    unseen = [each for each in found if each == reference]
    print(f"{len(unseen)} of {len(cases)} flips had no effect")
    assert len(unseen) < 10
    for case, each in zip(cases, found, strict=True):
        assert each in (f"[{case['rank']}], True", reference), case
