"""Evaluations of the ranks beside those of one process: which samples, and which numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.audit.audit import judge
from paceline.audit.events import (
    BackwardBegun,
    BatchGiven,
    CollectiveBegun,
    CollectiveEnded,
    Event,
    ForwardBegun,
    ForwardEnded,
    LoaderSeen,
    NumberRead,
)
from paceline.audit.evidence import RankLog, Run
from paceline.audit.progress import Progress
from paceline.audit.rules.evaluation import evaluated_samples, reported_numbers
from paceline.audit.rules.rule import Case, Finding, NoFault, NotJudged
from paceline.audit.run_plan import RunPlan

RANKS = pytest.mark.parametrize("count", [2, 3, 4])


def evaluates(samples: Sequence[int], *after: Event, dataset: int = 0) -> list[Event]:
    """A forward without gradient of these samples, and what follows."""
    ids = [*samples]
    return [
        LoaderSeen(loader="val", samples=dataset),
        BatchGiven(loader="val", ids=ids),
        ForwardEnded(at="t.py:7", steps_done=3, evaluation=1, rows=ids, samples=len(ids)),
        *after,
    ]


def reduces(
    given: Sequence[float], result: Sequence[float], op: str = "all_reduce", by: str = "SUM"
) -> list[Event]:
    begun = CollectiveBegun(op=op, at="t.py:8", reduce=by, evaluation=1, values=[*given])
    return [begun, CollectiveEnded(values=[*result])]


def reads(*values: float) -> list[Event]:
    return [NumberRead(at="t.py:9", value=value, evaluation=1) for value in values]


def case(one: list[Event], ranks: Sequence[list[Event]], null: list[Event] | None = None) -> Case:
    def run(mode: Any, *logs: list[Event]) -> Run:
        found = [RankLog(rank, events, []) for rank, events in enumerate(logs)]
        return Run(RunPlan(Path("x"), mode, len(logs), 20), found, 0)

    noise = run("null", one if null is None else null)
    return Case(run("solo", one), run("ordinary", *ranks), union=run("union", one), null=noise)


def shards(total: int, count: int) -> list[list[int]]:
    """Those of a DistributedSampler without shuffling: padded to equal lengths."""
    length = -(-total // count)
    return [[i % total for i in range(rank, length * count, count)] for rank in range(count)]


def parts(total: int, count: int) -> list[range]:
    """Shards without padding."""
    return [range(rank, total, count) for rank in range(count)]


@RANKS
@pytest.mark.parametrize("reverse", [False, True])
def test_padded_shards_whose_samples_are_counted(count: int, reverse: bool) -> None:
    own = shards(101, count)
    total = sum(map(len, own))
    whole = evaluates(range(101), *reduces([80.0, 101.0], [80.0, 101.0]))
    ranks = [evaluates(part, *reduces([20.0, len(part)], [81.0, total])) for part in own]
    judged = evaluated_samples(case(whole, ranks[::-1] if reverse else ranks))
    assert isinstance(judged, Finding)
    assert not judged.is_note
    assert (judged.at, judged.step) == ("t.py:7", 3)
    assert f"{total} samples in place of 101: {total - 101} of them several times" in judged.what
    assert isinstance(reported_numbers(case(whole, ranks)), NotJudged)


@RANKS
def test_a_count_of_the_samples_alone_may_be_one_of_the_work(count: int) -> None:
    """Such as for a speed; what the script removes before its metrics is not recorded."""
    own = shards(101, count)
    total = sum(map(len, own))
    ranks = [evaluates(part, *reduces([len(part)], [total])) for part in own]
    judged = evaluated_samples(case(evaluates(range(101), *reduces([101.0], [101.0])), ranks))
    assert isinstance(judged, Finding)
    assert judged.is_note


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (56 / 102, "fault"),  # right answers of 102 samples, and 55 of 101 on one process
        (0.5461, "note"),  # such as a loss
        (55 / 101, "passed"),  # the surplus is removed after a gather
        (56 / 101, "note"),  # it is removed; another sample is right by rounding
        (None, "not seen"),
    ],
)
def test_padded_shards_are_a_fault_if_a_number_counts_the_padding(
    value: float | None, kind: str
) -> None:
    def events(number: float | None) -> list[Event]:
        return [] if number is None else reads(number)

    ranks = [
        evaluates(part, *reduces([], [], "all_gather"), *events(value)) for part in shards(101, 2)
    ]
    whole = evaluates(range(101), *events(value and 55 / 101))
    judged = evaluated_samples(case(whole, ranks))
    kinds = {"passed": NoFault, "not seen": NotJudged}
    assert isinstance(judged, kinds.get(kind, Finding)), judged
    if isinstance(judged, Finding):
        assert judged.is_note == (kind == "note")


def test_one_padded_sample_of_many_is_a_note() -> None:
    whole = evaluates(range(19999), *reduces([1.0], [19999.0]))
    ranks = [evaluates(part, *reduces([1.0], [20000.0])) for part in shards(19999, 2)]
    judged = evaluated_samples(case(whole, ranks))
    assert isinstance(judged, Finding)
    assert judged.is_note
    strict = judge(case(whole, ranks), strict=True)["evaluated samples"]
    assert isinstance(strict, Finding)
    assert not strict.is_note


@pytest.mark.parametrize(("dataset", "is_note"), [(101, False), (120, True)])
def test_samples_that_no_rank_evaluates(dataset: int, is_note: bool) -> None:
    """By `drop_last` of a sampler; if one process leaves out some too, it may be the design."""
    whole = evaluates(range(101), *reduces([80.0, 101.0], [80.0, 101.0]), dataset=dataset)
    ranks = [evaluates(range(r, 100, 2), *reduces([40.0, 50.0], [79.0, 100.0])) for r in range(2)]
    judged = evaluated_samples(case(whole, ranks))
    assert isinstance(judged, Finding)
    assert judged.is_note == is_note
    assert "100 samples in place of 101: 1 never" in judged.what


def test_a_part_that_rank_0_evaluates_alone_may_be_an_estimate() -> None:
    ranks = [evaluates(range(0, 101, 2), *reads(40 / 51)), []]
    judged = evaluated_samples(case(evaluates(range(101), *reads(80 / 101), dataset=101), ranks))
    assert isinstance(judged, Finding)
    assert judged.is_note


def test_a_share_that_both_numbers_of_samples_allow_proves_nothing() -> None:
    ranks = [
        evaluates(part, *reduces([], [], "all_gather"), *reads(2 / 3)) for part in shards(9, 4)
    ]
    judged = evaluated_samples(
        case(evaluates(range(9), *reads(5 / 9)), ranks)
    )  # 8 of 12, or 6 of 9
    assert isinstance(judged, Finding)
    assert judged.is_note


def test_samples_that_each_rank_draws_are_not_judged() -> None:
    whole = evaluates(range(5), *reads(0.5))
    drawn = case(whole, [evaluates(part, *reads(0.6)) for part in ([7, 1, 2], [3, 7, 5])])
    assert isinstance(evaluated_samples(drawn), NotJudged)
    assert isinstance(reported_numbers(drawn), NotJudged)


@pytest.mark.parametrize("others", [[range(5)], [()]])
def test_an_evaluation_of_all_samples_on_each_rank_or_on_one(others: list[Any]) -> None:
    ranks = [evaluates(range(5), *reads(0.5)), *(evaluates(each) for each in others)]
    judged = case(evaluates(range(5), *reads(0.5)), ranks)
    assert isinstance(evaluated_samples(judged), NoFault)
    assert isinstance(reported_numbers(judged), NoFault)


def test_another_number_of_the_same_samples_on_each_rank_is_a_note() -> None:
    ranks = [evaluates(range(5), *reads(0.6))] * 2
    judged = case(evaluates(range(5), *reads(0.5)), ranks)
    assert isinstance(evaluated_samples(judged), NoFault)
    found = reported_numbers(judged)
    assert isinstance(found, Finding)
    assert found.is_note


def two(
    one: float,
    given: tuple[float, float],
    result: float,
    *,
    by: str = "SUM",
    op: str = "all_reduce",
) -> tuple[list[Event], list[list[Event]]]:
    """One process and two ranks, with 3 and 2 samples, that reduce a number."""
    ranks = [
        evaluates(part, *reduces([x], [result], op, by))
        for part, x in zip(([0, 2, 4], [1, 3]), given, strict=True)
    ]
    return evaluates(range(5), *reduces([one], [one], op, by)), ranks


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("by", "result"), [("SUM", 0.7), ("AVG", 0.35)])
def test_a_mean_of_means_is_a_fault(by: str, result: float, reverse: bool) -> None:
    whole, ranks = two(0.38, (0.5, 0.2), result, by=by)  # 0.38 = (3 * 0.5 + 2 * 0.2) / 5
    judged = reported_numbers(case(whole, ranks[::-1] if reverse else ranks))
    assert isinstance(judged, Finding)
    assert not judged.is_note
    assert judged.at == "t.py:8"
    assert judged.effect == "the mean changes by 7.89%"


def test_a_mean_of_means_that_is_read_too_is_a_fault() -> None:
    whole, ranks = two(0.38, (0.5, 0.2), 0.7)
    judged = reported_numbers(case(whole + reads(0.38), [each + reads(0.7) for each in ranks]))
    assert isinstance(judged, Finding)
    assert not judged.is_note


def test_a_mean_of_gathered_means_is_a_fault() -> None:
    whole, ranks = two(0.38, (0.5, 0.2), 0.0, op="all_gather")
    judged = reported_numbers(case(whole + reads(0.38), [each + reads(0.35) for each in ranks]))
    assert isinstance(judged, Finding)
    assert not judged.is_note
    weighted = case(whole + reads(0.38), [each + reads(0.38) for each in ranks])
    assert isinstance(reported_numbers(weighted), NoFault)


def test_a_number_that_is_no_mean_is_a_note() -> None:
    whole, ranks = two(0.6, (0.5, 0.9), 0.7, by="AVG")  # such as an F1 score
    judged = reported_numbers(case(whole, ranks))
    assert isinstance(judged, Finding)
    assert judged.is_note
    assert "0.7 on the ranks and 0.6 on one process" in judged.evidence


def test_a_sum_that_is_averaged_is_a_note() -> None:
    whole, ranks = two(5.5, (3.5, 2.0), 2.75, by="AVG")
    judged = reported_numbers(case(whole, ranks))
    assert isinstance(judged, Finding)
    assert judged.is_note
    assert judged.effect == "the number is 2 times too small"


@pytest.mark.parametrize(
    ("one", "given", "result", "by"),
    [
        (5.5, (3.5, 2.0), 5.5, "SUM"),
        (0.4, (0.5, 0.3), 0.8, "SUM"),  # it may be divided by the ranks later
        (0.4, (0.4, 0.4), 0.400001, "AVG"),  # rounding
        (5.0, (3.0, 2.0), 3.0, "MAX"),  # a size, to which the other rank pads
        (3e9, (1e9, 2e9), 3e9 + 256, "SUM"),  # too large for a count: rounding
    ],
)
def test_numbers_that_are_those_of_one_process(
    one: float, given: tuple[float, float], result: float, by: str
) -> None:
    judged = reported_numbers(case(*two(one, given, result, by=by)))
    assert isinstance(judged, NoFault), judged


def test_the_number_of_batches_is_not_compared() -> None:
    """5 samples in batches of 2: 3 batches on one process, 2 on each of two ranks."""
    ranks = [
        [*evaluates(part[:2]), *evaluates(part[2:], *reduces([2.0], [4.0]))]
        for part in ([0, 2, 4], [1, 3])
    ]
    whole = [*evaluates([0, 1]), *evaluates([2, 3]), *evaluates([4], *reduces([3.0], [3.0]))]
    assert isinstance(reported_numbers(case(whole, ranks)), NoFault)


def test_numbers_that_differ_between_ranks_are_no_result() -> None:
    """Such as a rank's own loss, printed after a reduction of another number."""
    ranks = [
        evaluates(part, *reduces([1.0], [5.0]), *reads(value))
        for part, value in zip(parts(5, 2), (0.6, 0.4), strict=True)
    ]
    whole = evaluates(range(5), *reduces([5.0], [5.0]), *reads(0.5))
    assert isinstance(reported_numbers(case(whole, ranks)), NoFault)


@pytest.mark.parametrize(("of_null", "found"), [(0.51, NoFault), (0.4, Finding)])
def test_a_number_that_one_process_does_not_repeat_is_left_out(of_null: float, found: type) -> None:
    """Such as a time, or dropout that is on."""
    ranks = [evaluates(part, *reads(0.7), *reduces([1.0], [1.0])) for part in parts(5, 2)]
    ranks = [[*each, *reads(0.7)] for each in ranks]
    whole, null = (
        evaluates(range(5), *reduces([1.0], [1.0]), *reads(value)) for value in (0.4, of_null)
    )
    assert isinstance(reported_numbers(case(whole, ranks, null)), found)


def test_a_quotient_of_means_is_that_of_the_sums() -> None:
    ranks = [evaluates(part, *reduces([1.0, 2.0], [1.75, 2.5], by="AVG")) for part in parts(5, 2)]
    whole = evaluates(range(5), *reduces([3.5, 5.0], [3.5, 5.0], by="AVG"))
    assert isinstance(reported_numbers(case(whole, ranks)), NoFault)


@RANKS
def test_a_sum_that_is_reduced_again(count: int) -> None:
    own = parts(8, count)
    sums = reduces([2.0, 4.0], [4.0, 8.0]), reduces([4.0, 8.0], [9.0, 16.0])
    ranks = [evaluates(part, *sums[0], *sums[1]) for part in own]
    whole = evaluates(range(8), *sums[0], *reduces([5.0, 8.0], [5.0, 8.0]))
    judged = reported_numbers(case(whole, ranks))
    assert isinstance(judged, Finding)
    assert judged.is_note
    assert "9 on the ranks and 5 on one process" in judged.evidence


def test_a_number_of_the_samples_of_rank_0() -> None:
    ranks = [evaluates(part, *reads(value)) for part, value in (([0, 2, 4], 0.6), ([1, 3], 0.4))]
    for each in (ranks, [ranks[0], evaluates([1, 3])]):
        judged = reported_numbers(case(evaluates(range(5), *reads(0.5)), each))
        assert isinstance(judged, Finding)
        assert judged.is_note
        assert (judged.at, judged.effect) == ("t.py:9", "60% of the samples are in the number")
    equal = [evaluates(part, *reads(0.1)) for part in parts(5, 2)]  # such as a learning rate
    assert isinstance(reported_numbers(case(evaluates(range(5), *reads(0.1)), equal)), NoFault)


@pytest.mark.parametrize("rule", [evaluated_samples, reported_numbers])
def test_without_a_union_nothing_is_compared(rule: Any) -> None:
    empty = case([], [[], []])
    assert isinstance(rule(empty), NotJudged)
    alone = Case(empty.solo, empty.ordinary, why_no_union="no union.")
    assert rule(alone) == NotJudged("no union.")


def _batch(*ids: int) -> BatchGiven:
    return BatchGiven(loader="val", ids=[*ids])


def _used(*rows: int, model: int = 0) -> ForwardEnded:
    return ForwardEnded(evaluation=1, model=model, samples=len(rows), rows=list(rows))


@pytest.mark.parametrize(
    "events",
    [
        [_batch(0, 1), _used(7, 8), _batch(2, 3), _used(8, 9)],
        # The loader is one batch ahead.
        [_batch(0, 1), _batch(2, 3), _used(7, 8), _used(8, 9)],
        # Several models, or parts of a batch.
        [_batch(0, 1), _used(7, 8), _used(7, 8, model=1), _batch(2, 3), _used(8), _used(9)],
    ],
)
def test_the_samples_of_an_evaluation(events: list[Event]) -> None:
    assert RankLog(0, events, []).evaluations[1].rows == {"val": [0, 1, 2, 3]}


def test_the_samples_of_each_reduction_and_the_numbers_of_an_evaluation() -> None:
    events = [
        *(_batch(0), _used(0), _batch(1), _used(1)),
        *(*reads(0.1), *reduces([1.0], [1.0]), *reads(0.2)),
        *(_batch(2), _used(2), *reduces([2.0], [2.0]), *reduces([3.0], [3.0])),
        *(BatchGiven(loader="train"), *reads(0.3), ForwardEnded(trains=True), BackwardBegun()),
    ]
    evaluation = RankLog(0, events, []).evaluations[1]
    assert [call.samples for call in evaluation.calls["t.py:8"]] == [2, 1, 1]
    assert evaluation.numbers == {"t.py:9": [0.2]}


def test_without_indices_the_inputs_are_the_samples() -> None:
    events: list[Event] = [BatchGiven(loader="val"), _used(7, 8), _used(9)]
    assert RankLog(0, events, []).evaluations[1].rows == {"": [7, 8, 9]}


def test_a_loader_whose_evaluation_is_left_early_is_not_trained_on(tmp_path: Path) -> None:
    """Its latest batch is unused when the next pass of the training begins."""
    recorder: Any = None
    progress = Progress(RunPlan(tmp_path, "ordinary", 2, 20), recorder, 0)
    events: list[Event] = []
    for number in range(1, 4):
        progress.on_batch("val")
        progress.on_forward(trains=False)
        assert progress.on_no_grad_forward(of_trained=True)
        progress.on_batch("val")
        progress.on_batch("train")
        progress.on_forward(trains=True)
        progress.on_backward()
        progress.on_step(progress)
        events += [_batch(number), ForwardBegun(), _used(number), _batch(number)]
        events += [BatchGiven(loader="train"), ForwardBegun(), ForwardEnded(trains=True)]
        events.append(BackwardBegun())
    assert [*progress.training_loaders] == ["train"]
    assert RankLog(0, events, []).training_loaders == ["train"]
