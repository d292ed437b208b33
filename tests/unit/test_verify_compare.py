"""The comparison of runs that use paceline, on made-up runs: only the first difference is reported."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.audit.audit import AuditResult
from paceline.audit.events import (
    Evaluated,
    Event,
    ForwardEnded,
    TrainingBuilt,
    TrainingStarted,
    TrainingStep,
)
from paceline.audit.evidence import RankLog, Run
from paceline.audit.refusals import Refused
from paceline.audit.rules.rule import Case, Finding, NoFault, NotJudged
from paceline.audit.run_plan import RunPlan
from paceline.verify.compare import compare
from paceline.verify.report import report

STEPS = 4
Change = dict[tuple[int, str], Any]


def training(rank: int, count: int, change: Change, t: int = 0) -> list[Event]:
    """The events of a rank that trains four samples a step; `change` is by step and fact."""
    start = change.get((0, "params"), {"w": ["d0", 2.0, 2.0]})
    events: list[Event] = [
        TrainingBuilt(training=t, at="t.py:9 in main()", precision="fp32", batchnorm=""),
        TrainingStarted(training=t, params=start),
    ]
    for s in range(1, STEPS + 1):
        mine = [i for i in range(4 * s - 4, 4 * s) if i % count == rank]
        step = TrainingStep(
            training=t,
            step=s,
            ids=mine,
            loss=float(len(mine)),
            count=float(len(mine)),
            params={"w": [f"d{s}", 2.0, 3.0]},
            grads={"w": [f"g{s}", 3.0, 3.0]},
            buffers={"mean": ["b", 1.0, 1.0]},
        )
        own = {name: value for (at, name), value in change.items() if at == s}
        events.append(replace(step, **{name: own[name] for name in own if hasattr(step, name)}))
        if (s, "score") in change:
            values = {"accuracy": change[s, "score"]}
            samples = change.get((s, "samples"), 360)
            events.append(Evaluated(at="t.py:20", samples=samples, values=values))
    return events


def runs(
    *changes: Change, one: Change | None = None, facts: dict[str, Any] | None = None
) -> list[Run]:
    """A correct run of one process, and a run of as many as there are changes."""
    found = []
    for count, each in ((1, (one or {},)), (len(changes), changes)):
        logs = [RankLog(r, training(r, count, change), []) for r, change in enumerate(each)]
        for log in logs:
            log.events[0] = replace(log.events[0], **facts or {})
        found.append(Run(RunPlan(Path("x"), "ordinary", count, STEPS), logs, 0))
    return found


def is_equal(found: list[Run], *, rtol: float | None = None, bitwise: bool = False) -> bool:
    return difference_of(found, rtol=rtol, bitwise=bitwise) is None


def difference_of(
    found: list[Run], *, rtol: float | None = None, bitwise: bool = False
) -> tuple[str, Finding] | None:
    """The quantity that differs, and the finding."""
    judged = compare(*found, rtol=rtol, bitwise=bitwise).items()
    return next(((name, each) for name, each in judged if isinstance(each, Finding)), None)


def passed(found: list[Run], *, bitwise: bool = False) -> dict[str, str]:
    judged = compare(*found, rtol=None, bitwise=bitwise).items()
    return {name: each.evidence for name, each in judged if isinstance(each, NoFault)}


def not_seen(found: list[Run]) -> dict[str, str]:
    judged = compare(*found, rtol=None, bitwise=False).items()
    return {name: each.why for name, each in judged if isinstance(each, NotJudged)}


def test_equal_runs_have_no_difference() -> None:
    times = {
        "parameter of ranks": 10, "weights at the start": 3, "samples of a step": 4, "loss": 4,
        "gradient norm": 4, "gradient": 4, "parameter": 12, "buffer": 12,
    }  # fmt: skip
    found = passed(runs({}, {}, {}), bitwise=True)
    assert found == {name: f"{n} compared, all bits are equal." for name, n in times.items()}
    assert list(not_seen(runs({}, {}, {}))) == ["evaluation"]
    scored = runs({(4, "score"): 0.5}, {(4, "score"): 0.5}, one={(4, "score"): 0.5})
    assert "largest relative difference is 0" in passed(scored)["evaluation"]
    assert not not_seen(scored)


def test_no_run_that_failed_is_followed_by_exit_code_0() -> None:
    solo, several = runs({}, {})
    judged = compare(solo, several, rtol=None, bitwise=False)
    assert report([AuditResult(Case(solo, several), judged)], []).exit_code == 0
    several = replace(several, returncode=1)
    assert report([AuditResult(Case(solo, several), judged)], []).exit_code == 3


@pytest.mark.parametrize(("of_rank", "is_compared"), [(32, True), (64, False)])
def test_a_batchnorm_over_other_numbers_of_samples_is_not_compared(
    of_rank: int, is_compared: bool
) -> None:
    change = {(2, "loss"): 9.0}
    made = runs(change, change, facts={"batchnorm": "synchronised"})
    for run, samples in zip(made, (64, of_rank), strict=True):
        for log in run.ranks:
            log.events.insert(0, ForwardEnded(trains=True, samples=samples))
    assert is_equal(made) is not is_compared
    assert ("losses and gradients" in not_seen(made)) is not is_compared


def test_samples_that_one_process_repeats_too_may_repeat() -> None:
    repeated = {(3, "ids"): [4, 5, 8, 10]}  # 4 and 5 again, as with replacement=True
    assert is_equal(runs({(3, "ids"): [4, 8]}, {(3, "ids"): [5, 10]}, one=repeated))
    found = difference_of(runs({(3, "ids"): [4, 8]}, {(3, "ids"): [4, 10]}, one=repeated))
    assert found is not None
    assert (found[0], found[1].step) == ("samples of a step", 3)


def test_samples_that_no_run_recorded_are_not_compared() -> None:
    nothing = {(3, "ids"): []}
    assert "3 compared" in passed(runs(nothing, nothing, one=nothing))["samples of a step"]


def test_a_loss_whose_terms_cancel_out_is_equal_up_to_their_rounding() -> None:
    """Such as that of a policy gradient with normalised advantages."""
    one = {(1, "loss"): -1.1e-8, (1, "loss_size"): 2.0}
    rank = {(1, "loss"): -4e-9, (1, "loss_size"): 1.0}
    assert is_equal(runs(rank, rank, one=one))
    assert not is_equal(runs(rank, rank | {(1, "loss"): 4e-3}, one=one))


OTHER = {"w": ["other", 2.5, 3.0]}
FIRST = [
    ({(2, "ids"): [5, 99]}, 2, "samples of a step", "7 on 1 process, 99 on 2"),
    ({(3, "ids"): [9, 9]}, 3, "samples of a step", "11 on 1 process, 9 on 2"),
    ({(3, "loss"): 2.5, (4, "ids"): []}, 3, "loss", "1.0 on 1 process, 1.125 on 2"),
    ({(2, "params"): OTHER}, 2, "parameter of ranks", "2.0 on rank 0, 2.5 on rank 1"),
    (
        {(2, "params"): {"w": ["other", 2.0, 3.0]}},
        2,
        "parameter of ranks",
        "'d2' on rank 0, 'other' on rank 1",
    ),
    ({(2, "params"): {}}, 2, "parameter of ranks", "2.0 on rank 0, none on rank 1"),
]


@pytest.mark.parametrize("bitwise", [True, False])
@pytest.mark.parametrize(("change", "step", "quantity", "shown"), FIRST)
def test_the_first_difference(
    change: Change, step: int, quantity: str, shown: str, bitwise: bool
) -> None:
    found = difference_of(runs({}, change), bitwise=bitwise)
    assert found is not None
    name, finding = found
    assert (name, finding.step, finding.evidence) == (quantity, step, shown)
    assert finding.at == "t.py:9 in main()"
    if quantity == "parameter of ranks":
        assert finding.what == "in step 2, parameter w differs between rank 0 and rank 1."
        assert finding.ranks == [1]
    else:
        assert finding.what.startswith(f"in step {step}, {quantity} differ")
        assert finding.what.endswith("between 1 and 2 processes.")


@pytest.mark.parametrize(
    ("fact", "other", "quantity", "by_default"),
    [
        ("params", ["other", 2.5, 3.0], "parameter", False),
        ("params", ["other", 2.0, 3.0], "parameter", False),
        ("buffers", ["c", 1.1, 1.1], "buffer", False),
        ("grads", ["h", 6.0, 3.0], "gradient norm", True),
        ("grads", ["h", 3.0, -3.0], "gradient", False),
    ],
)
def test_tensors_that_all_ranks_share(
    fact: str, other: Any, quantity: str, by_default: bool
) -> None:
    """Bitwise, every tensor is compared; by default only the gradient norm is."""
    change = {(2, fact): {"mean" if fact == "buffers" else "w": other}}
    found = difference_of(runs(change, change), bitwise=True)
    assert found is not None
    assert (found[0], found[1].step) == (quantity, 2)
    assert is_equal(runs(change, change)) is not by_default


@pytest.mark.parametrize("start", [["other", 2.5, 2.0], ["other", 2.0, -1.0]])
def test_other_weights_at_the_start(start: Any) -> None:
    change = {(0, "params"): {"w": start}}
    found = difference_of(runs(change, change))
    assert found is not None
    assert (found[0], found[1].step) == ("weights at the start", None)
    assert found[1].what.startswith("before the first step, weights at the start w differs")


def test_a_gradient_of_one_run_only() -> None:
    change = {(2, "grads"): {"w": ["g2", 3.0, 3.0], "v": ["v", 1e-9, 1e-9]}}
    found = difference_of(runs(change, change))
    assert found is not None
    assert "gradient v differs" in found[1].what
    assert found[1].evidence == "none on 1 process, 1e-09 on 2"


def test_rounding_is_a_difference_only_bitwise() -> None:
    change = {(0, "params"): {"w": ["other", 2.0, 2.0 + 1e-7]}, (2, "loss"): 2.0 + 1e-7}
    assert is_equal(runs(change, change))
    assert not is_equal(runs(change, change), rtol=1e-9)
    assert not is_equal(runs(change, change), bitwise=True)


def test_a_small_loss_has_the_rounding_error_of_the_larger_ones_before_it() -> None:
    small = {(3, "loss"): 4e-4}
    assert is_equal(runs({(3, "loss"): 3e-4}, {(3, "loss"): 2e-4}, one=small))
    assert not is_equal(runs({(3, "loss"): 3e-2}, {(3, "loss"): 2e-2}, one=small))
    # The first one is not small yet.
    small = {(1, "loss"): 4e-4}
    assert not is_equal(runs({(1, "loss"): 3e-4}, {(1, "loss"): 2e-4}, one=small))


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_hides_no_later_difference(loss: float) -> None:
    one = {(2, "loss"): loss}
    assert is_equal(runs(one, one, one=one))
    many = one | {(3, "loss"): 2.5}
    assert not is_equal(runs(many, many, one=one))


def test_a_score_that_counts_may_be_off_by_one_sample() -> None:
    one = {(2, "score"): 355 / 360}
    for count, sound in ((356, True), (357, False)):
        many = {(2, "score"): count / 360}
        assert is_equal(runs(many, many, one=one)) is sound
        assert not is_equal(runs(many, many, one=one), bitwise=True)
    mean = {(2, "score"): 0.98612}
    assert not is_equal(runs(mean, mean, one={(2, "score"): 0.98888}))


def test_a_score_that_is_not_a_number_on_both_runs_is_equal() -> None:
    one, many = {(2, "score"): math.nan}, {(2, "score"): 0.5}
    assert is_equal(runs(one, one, one=one))
    assert not is_equal(runs(many, many, one=one))


def test_a_score_of_one_rank_and_its_samples() -> None:
    one = {(2, "score"): 1.0}
    found = difference_of(runs(one, one | {(2, "samples"): 361}, one=one))
    assert found is not None
    assert found[0] == "samples of an evaluation"
    assert found[1].what.startswith("after step 2, samples of an evaluation differs")
    assert found[1].at == "t.py:20"
    found = difference_of(runs(one, {(2, "score"): 0.5}, one=one))
    assert found is not None
    assert (found[0], found[1].evidence) == ("evaluation", "1.0 on 1 process, 0.5 on 2")


def test_a_second_training_counts_its_epochs_itself() -> None:
    found = runs({}, {})
    for run in found:
        for log in run.ranks:
            log.events.extend(training(log.rank, run.plan.world_size, {}, t=1))
    assert is_equal(found)
    last = found[1].ranks[1].events
    last[-1] = replace(last[-1], ids=[])
    difference = difference_of(found)
    assert difference is not None
    assert (difference[0], difference[1].step) == ("samples of a step", STEPS)


@pytest.mark.parametrize(
    ("facts", "word"), [({"batchnorm": "local"}, "BatchNorm"), ({"precision": "bf16"}, "bf16")]
)
def test_what_cannot_be_equal_is_not_judged(facts: Any, word: str) -> None:
    made = runs({}, {(2, "loss"): 9.0}, facts=facts)
    assert is_equal(made)
    assert word in not_seen(made)["losses and gradients"]
    assert not is_equal(made, bitwise=True)
    start = {(0, "params"): OTHER}
    found = difference_of(runs(start, start, facts=facts))
    assert found is not None
    assert found[0] == "weights at the start"
    # The ranks of one run hold the same weights all the same.
    found = difference_of(runs({}, {(2, "params"): OTHER}, facts=facts))
    assert found is not None
    assert found[0] == "parameter of ranks"


@pytest.mark.parametrize(("batchnorm", "is_advised"), [("", True), ("synchronised", False)])
def test_bitwise_is_not_advised_where_training_refuses_it(batchnorm: str, is_advised: bool) -> None:
    found = runs({}, {}, facts={"batchnorm": batchnorm, "precision": "bf16"})
    for run in found:
        run.ranks[0].events.append(ForwardEnded(trains=True, drew=["torch"]))
    why = not_seen(found)["losses and gradients"]
    assert "random numbers" in why
    assert "bf16" in why
    assert ("--bitwise" in why) is is_advised


def test_scores_of_a_synchronised_batchnorm_are_compared_only_bitwise() -> None:
    facts = {"batchnorm": "synchronised"}
    one, many = {(2, "score"): 1.0}, {(2, "score"): 0.5}
    found = runs(many, many, one=one, facts=facts)
    assert is_equal(found)
    assert list(not_seen(found)) == ["evaluation"]
    assert not is_equal(found, bitwise=True)
    assert not is_equal(runs({}, {(2, "loss"): 9.0}, facts=facts))


def test_another_number_of_steps_is_refused() -> None:
    one, two = runs({}, {})
    for log in two.ranks:
        log.events.pop()
    with pytest.raises(Refused, match="4 steps and 0 evaluations with 1 process and 3 steps and"):
        compare(one, two, rtol=None, bitwise=False)


def test_another_number_of_evaluations_is_refused() -> None:
    with pytest.raises(Refused, match="1 evaluation with 1 process and 4 steps and 0 evaluations"):
        compare(*runs({}, {}, one={(2, "score"): 1.0}), rtol=None, bitwise=False)
    at_two, at_three = {(2, "score"): 1.0}, {(3, "score"): 1.0}
    with pytest.raises(Refused, match="order depends on the number of processes"):
        compare(*runs(at_three, at_three, one=at_two), rtol=None, bitwise=False)


@pytest.mark.parametrize("of_one", [True, False])
def test_a_score_of_one_of_the_runs_only_is_a_difference(of_one: bool) -> None:
    found = runs({(4, "score"): 0.5}, {(4, "score"): 0.5}, one={(4, "score"): 0.5})
    for run in found[:1] if of_one else found[1:]:
        for log in run.ranks:
            event = log.events[-1]
            assert isinstance(event, Evaluated)
            log.events[-1] = replace(event, values={**event.values, "f1": 0.4})
    difference = difference_of(found)
    assert difference is not None
    assert "evaluation f1 differs" in difference[1].what
