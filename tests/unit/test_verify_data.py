"""Shards, the order of passes, and random numbers: judged from logs that are made by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from paceline.audit.events import (
    BackwardBegun,
    BatchGiven,
    Event,
    ForwardBegun,
    ForwardEnded,
    LoaderSeen,
    PassBegun,
    PassExhausted,
    SamplesLoaded,
    SeedSet,
)
from paceline.audit.evidence import RankLog, Run
from paceline.audit.rules.order import order_of_passes
from paceline.audit.rules.random_numbers import random_numbers
from paceline.audit.rules.rule import Case, Finding, NoFault, NotJudged
from paceline.audit.rules.shards import shards
from paceline.audit.run_plan import RunPlan

Passes = Sequence[Sequence[int]]
CUSTOM = LoaderSeen(loader="a", at="t.py:1", batch_size=4, samples=400, root_samples=400)
DIVIDED = replace(
    CUSTOM,
    sampler="DistributedSampler",
    sharding={"num_replicas": 2, "seed": 0, "shuffle": True, "epoch": 0},
)


def log_of(
    loader: LoaderSeen,
    passes: Passes,
    contents: Sequence[dict[int, int]] = (),
    *,
    ended: bool = True,
    at: Sequence[str] = (),
) -> RankLog:
    """A rank that trains on these indices, in batches of 4; `contents` are the samples by index."""
    events: list[Event] = [SeedSet(at="t.py:9"), loader]
    fetches: list[SamplesLoaded] = []
    for number, ids in enumerate(passes):
        place: dict[str, Any] = {"loader": "a", "pass_number": number}
        events.append(PassBegun(**place, epoch=0, at=at[number] if at else ""))
        own = contents[number] if contents else {}
        for first in range(0, len(ids), 4):
            batch = list(ids[first : first + 4])
            events.append(
                BatchGiven(**place, ids=None if loader.iterable else batch, content=first)
            )
            events += [ForwardBegun(), ForwardEnded(trains=True, sync=True), BackwardBegun()]
            digests = [own.get(i, 1000 + i) for i in batch]
            fetches.append(SamplesLoaded(**place, ids=batch, contents=digests, magnitudes=digests))
        events += [PassExhausted(**place)] * ended
    return RankLog(0, events, fetches)


def case_of(ranks: Sequence[RankLog], solo: RankLog | None = None) -> Case:
    numbered = [replace(log, rank=rank) for rank, log in enumerate(ranks)]
    one, several = (RunPlan(Path("x"), "ordinary", n, 20) for n in (1, len(ranks)))
    return Case(Run(one, [solo or numbered[0]], 0), Run(several, numbered, 0))


def judge_parts(
    loader: LoaderSeen, parts: Passes, *, whole: Sequence[int] = (), ended: bool = True
) -> Any:
    """The judgement of one pass in which the ranks read these parts, and one process the whole."""
    ranks = [log_of(loader, [part], ended=ended) for part in parts]
    return shards(
        case_of(ranks, log_of(loader, [whole or sorted({i for part in parts for i in part})]))
    )


# Shards


@pytest.mark.parametrize(
    ("loader", "parts", "found"),
    [
        (DIVIDED, [range(40), range(40, 80)], "passed"),
        (DIVIDED, [range(40), [*range(40, 79), 0]], "passed"),  # padding of a sampler
        (DIVIDED, [range(40), [*range(40, 78), 0, 1]], "note"),
        (CUSTOM, [range(40), [*range(40, 73), *range(7)]], "passed"),  # padding of batches
        (CUSTOM, [range(40), [*range(40, 72), *range(8)]], "note"),
        (CUSTOM, [range(80), range(80)], "fault"),
        (CUSTOM, [range(80), range(79, -1, -1)], "fault"),
        (CUSTOM, [[*range(40), *range(40)], range(40)], "fault"),  # one began again
        (CUSTOM, [[1, 2, 1, 3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 7, 8, 9, 10, 11]], "not judged"),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_samples_that_ranks_share(
    loader: LoaderSeen, parts: Passes, found: str, swapped: bool
) -> None:
    judged = judge_parts(loader, parts[::-1] if swapped else parts)
    kinds: dict[type, str] = {NoFault: "passed", NotJudged: "not judged"}
    if isinstance(judged, Finding):
        assert ("note" if judged.is_note else "fault") == found, judged
        assert "samples of pass 1 were read by more than one rank" in judged.evidence
    else:
        assert kinds[type(judged)] == found, judged


def test_the_order_of_three_ranks_does_not_matter() -> None:
    loader = replace(DIVIDED, sharding={**DIVIDED.sharding, "num_replicas": 3})
    parts = [range(20), range(20, 40), [*range(40, 52), *range(8)]]
    found = {judge_parts(loader, order).evidence for order in permutations(parts)}
    assert found == {"8 of 52 samples of pass 1 were read by more than one rank"}


def test_one_process_that_repeats_samples() -> None:
    again = [*range(8), *range(4), *range(8, 80)]
    judged = judge_parts(CUSTOM, [range(80), range(80)], whole=again)
    assert isinstance(judged, NotJudged)


def test_samples_that_no_rank_reads() -> None:
    for missing, found in ((7, NoFault), (8, Finding)):
        parts = [range(40), range(40, 80 - missing)]
        judged = judge_parts(DIVIDED, parts, whole=range(80))
        assert isinstance(judged, found), judged
    assert judged.is_note
    assert "8 of 80 samples of one process were read by no rank" in judged.evidence
    # The pass may go on, or one process may have other samples.
    assert isinstance(judge_parts(DIVIDED, parts, whole=range(80), ended=False), NoFault)
    assert isinstance(judge_parts(DIVIDED, parts, whole=range(9, 99)), NoFault)


@pytest.mark.parametrize(
    ("cause", "common", "found"),
    [
        ({"sharding": {"num_replicas": 2, "seed": 7, "shuffle": True}}, 0, "their seeds are 0, 7"),
        ({"split": 7}, 1, "split the dataset in a different way"),
        ({"split": 7}, 0, ""),
    ],
)
def test_few_steps_show_that_shards_are_cut_differently(
    cause: dict[str, Any], common: int, found: str
) -> None:
    parts = range(20), [*range(common), *range(100, 120)]
    loaders = DIVIDED, replace(DIVIDED, **cause)
    judged = shards(
        case_of(
            [log_of(*each, ended=False) for each in zip(loaders, [[p] for p in parts], strict=True)]
        )
    )
    assert isinstance(judged, Finding) == bool(found), judged
    if isinstance(judged, Finding):
        assert found in judged.what
        assert not judged.is_note


@pytest.mark.parametrize(("sharding", "found"), [({}, Finding), ({"replacement": True}, NotJudged)])
def test_torchs_sampler_reads_the_whole_dataset_on_each_rank(
    sharding: dict[str, Any], found: type
) -> None:
    loader = replace(CUSTOM, sampler="RandomSampler", batches=100, sharding=sharding)
    drawn = random.Random(0).sample(range(400), 40), random.Random(1).sample(range(400), 40)
    judged = judge_parts(loader, drawn, ended=False)
    assert isinstance(judged, found), judged
    apart = judge_parts(loader, [range(40), range(40, 80)], ended=False)
    assert isinstance(apart, NotJudged)  # not enough steps


@pytest.mark.parametrize("own", [True, False])
def test_each_rank_may_use_another_part_of_the_same_samples(own: bool) -> None:
    """Such as another level of noise: what the models are given tells."""
    ranks = []
    for rank in range(3):
        log = log_of(CUSTOM, [range(80)])
        rows = iter(range(100 * rank * own, 1000))
        events = [
            replace(e, rows=[next(rows), next(rows)], draws=True)
            if isinstance(e, ForwardEnded)
            else e
            for e in log.events
        ]
        ranks.append(replace(log, events=events))
    judged = shards(case_of(ranks))
    assert isinstance(judged, Finding)
    assert judged.is_note == own


def test_groups_of_ranks_may_read_the_same_shard() -> None:
    judged = judge_parts(DIVIDED, [range(40), range(40), range(40, 80), range(40, 80)])
    assert isinstance(judged, NotJudged), judged


@pytest.mark.parametrize(
    ("second", "found"),
    [([range(50), range(50, 100)], NoFault), ([range(50), range(40, 90)], Finding)],
)
def test_the_shards_of_a_later_pass(second: Passes, found: type) -> None:
    first = [range(50), range(50, 100)]
    for ended in (True, False):
        ranks = [log_of(DIVIDED, list(own), ended=ended) for own in zip(first, second, strict=True)]
        judged = shards(case_of(ranks, log_of(DIVIDED, [range(100)] * 2, ended=ended)))
        assert isinstance(judged, found if ended else NoFault), judged
        if isinstance(judged, Finding):
            assert judged.evidence.startswith("10 of 90 samples of pass 2")


STREAM = replace(CUSTOM, iterable=True, samples=None, root_samples=None)


@pytest.mark.parametrize(
    ("parts", "is_note"),
    [
        ([range(40), range(40)], False),
        ([range(40), range(20, 60)], True),
        ([range(40), range(40, 80)], None),
        ([[*range(40), *range(40)], range(40, 80)], None),  # one began again
        ([[*range(8), *range(8), *range(40)], range(40)], None),  # files are drawn with replacement
    ],
)
def test_streams(parts: Passes, is_note: bool | None) -> None:
    judged = judge_parts(STREAM, parts, whole=range(80), ended=False)
    assert (judged.is_note if isinstance(judged, Finding) else None) == is_note, judged


OWN = {i: 5000 + i for i in range(400)}
HALF = {i: 5000 + i for i in range(20)}


@pytest.mark.parametrize(
    ("loader", "contents", "found"),
    [
        (DIVIDED, [[{}] * 3, [{}] * 3], NoFault),
        (DIVIDED, [[{}] * 3, [OWN] * 3], Finding),
        (DIVIDED, [[{}] * 3, [HALF] * 3], Finding),
        (DIVIDED, [[{}] * 2, [HALF] * 2], NotJudged),  # not read again: they may be random
        (DIVIDED, [[{}] * 3, [HALF, HALF, OWN]], NotJudged),  # they are
        (CUSTOM, [[{}] * 3, [OWN] * 3], NoFault),  # data of each rank's own
        (CUSTOM, [[{}] * 3, [HALF] * 3], NotJudged),
    ],
)
def test_one_index_has_one_sample(loader: LoaderSeen, contents: Any, found: type) -> None:
    first, second = range(40), range(40, 80)
    orders = [first, second, first], [second, first, second]
    ranks = [
        log_of(loader, passes[: len(own)], own)
        for passes, own in zip(orders, contents, strict=True)
    ]
    judged = shards(case_of(ranks, log_of(loader, [range(80)] * 3)))
    assert isinstance(judged, found), judged


def test_values_that_depend_on_the_number_of_processes() -> None:
    def judge(factor: float) -> Any:
        contents = {i: int((1000 + i) * factor) for i in range(80)}
        ranks = [log_of(DIVIDED, [p] * 2, [contents] * 2) for p in (range(40), range(40, 80))]
        return shards(case_of(ranks, log_of(DIVIDED, [range(80)] * 2)))

    assert isinstance(judge(1), NoFault)
    judged = judge(2)
    assert isinstance(judged, Finding)
    assert judged.is_note
    assert judged.effect == "80 of 80 samples have other values"


def gives(batches: Passes) -> list[Event]:
    """A rank without a DataLoader, whose model gets these rows."""
    events: list[Event] = []
    for rows in batches:
        events += [ForwardEnded(trains=True, rows=list(rows), samples=len(rows), sync=True)]
        events += [BackwardBegun()]
    return events


def test_rows_of_models_without_a_loader() -> None:
    orders = [random.Random(seed).sample(range(960), 960) for seed in range(3)]
    batches = [order[first : first + 16] for order in orders for first in range(0, 960, 16)]
    parts = [RankLog(0, gives([batch[rank::2] for batch in batches]), []) for rank in range(2)]
    assert isinstance(shards(case_of(parts)), NoFault)
    shifted = [RankLog(0, gives(own), []) for own in (batches, [*batches[9:], *batches[:9]])]
    same = [RankLog(0, gives(batches[:9]), [])] * 2
    constant = [RankLog(0, gives([range(8)] * 9), [])] * 2
    assert isinstance(shards(case_of(same)), Finding)
    assert isinstance(shards(case_of(constant)), NotJudged)
    assert isinstance(shards(case_of(shifted)), NoFault)  # the first pass of one is not whole
    one_pass = [
        RankLog(0, gives(own), []) for own in (batches[:60], [*batches[9:60], *batches[:9]])
    ]
    assert isinstance(shards(case_of(one_pass)), Finding)


def test_ranks_that_use_a_part_of_equal_batches() -> None:
    def rank(number: int, *, part: bool, loss: float = 1.0) -> RankLog:
        log = log_of(CUSTOM, [range(40)])
        rows = [10, 11, 12, 13]
        own = rows[2 * number : 2 * number + 2] if part else rows
        events: list[Event] = []
        for i, event in enumerate(log.events):
            if isinstance(event, ForwardEnded):
                event = replace(event, rows=[100 * i + row for row in own])
            if isinstance(event, BackwardBegun):
                event = replace(event, loss=loss)
            if isinstance(event, BatchGiven):
                event = replace(event, size=4)
            events.append(event)
        return RankLog(number, events, log.fetches)

    assert isinstance(shards(case_of([rank(n, part=False) for n in range(2)])), Finding)
    assert isinstance(shards(case_of([rank(n, part=True) for n in range(2)])), NoFault)
    # Such as the halves of each sequence.
    losses = [rank(n, part=False, loss=1.0 + n) for n in range(2)]
    assert isinstance(shards(case_of(losses)), NotJudged)


# The order of passes

SHUFFLED = [3, 1, 2, 0, 7, 5, 6, 4]


@pytest.mark.parametrize(
    ("changes", "passes", "at", "is_note"),
    [
        ({}, [SHUFFLED, SHUFFLED], (), False),
        ({}, [SHUFFLED, SHUFFLED[::-1]], (), None),
        ({}, [range(8), range(8)], (), None),  # not shuffled
        ({}, [SHUFFLED], (), None),
        ({}, [SHUFFLED, SHUFFLED], ("t.py:2", "t.py:3"), True),  # two loops of one epoch
        ({"sharding": {"shuffle": False, "epoch": 0}}, [SHUFFLED, SHUFFLED], (), None),
        ({"sharding": {}}, [SHUFFLED, SHUFFLED], (), None),
        ({"reorders": True}, [SHUFFLED, SHUFFLED], (), False),
        ({"reorders": False}, [SHUFFLED, SHUFFLED], (), None),  # a curriculum, in any epoch
        ({"sharding": {}, "takes_epoch": True, "iterable": True}, [SHUFFLED] * 2, (), False),
        (
            {"sharding": {}, "takes_epoch": True, "iterable": True, "of_library": True},
            [SHUFFLED] * 2,
            (),
            True,
        ),
    ],
)
def test_two_passes_of_one_order(
    changes: dict[str, Any], passes: Passes, at: Sequence[str], is_note: bool | None
) -> None:
    ranks = [log_of(replace(DIVIDED, **changes), passes, at=at) for _ in range(2)]
    judged = order_of_passes(case_of(ranks))
    assert (judged.is_note if isinstance(judged, Finding) else None) == is_note, judged


def test_ranks_with_different_epochs() -> None:
    ranks = [log_of(DIVIDED, [SHUFFLED, SHUFFLED[::-1]]) for _ in range(2)]
    later = [replace(e, epoch=1) if isinstance(e, PassBegun) and e.pass_number else e
             for e in ranks[0].events]  # fmt: skip
    judged = order_of_passes(case_of([replace(ranks[0], events=later), ranks[1]]))
    assert isinstance(judged, Finding)
    assert list(judged.ranks) == [1]
    assert "in pass 2" in judged.what


# Random numbers


def forwards(
    states: Sequence[int], *, draws: bool = False, drew: Sequence[str] = ()
) -> list[Event]:
    """Forwards of training that find these states of the generators."""
    return [
        ForwardEnded(
            trains=True,
            sync=True,
            at="t.py:1",
            samples=4,
            draws=draws,
            drew=list(drew),
            random={"torch": state, "cuda": state},
        )
        for state in states
    ]


def judge_forwards(*ranks: list[Event]) -> Any:
    return random_numbers(case_of([RankLog(0, events, []) for events in ranks]))


@pytest.mark.parametrize(
    ("second", "drawn", "found"),
    [
        ([1, 2, 3, 4], {"drew": ["torch"]}, "'torch'"),
        ([1, 2, 3, 4], {"drew": ["cuda"]}, "'cuda'"),
        ([1, 2, 3, 4], {"draws": True}, "between the batch and the forward"),
        ([1, 2, 3, 4], {"drew": ["random"]}, ""),  # a choice that must be alike
        ([1, 2, 3, 4], {}, ""),
        ([1, 2, 8, 9], {"drew": ["torch"]}, ""),  # a constant of the first forwards
        ([9, 2, 3, 4], {"drew": ["torch"]}, "'torch'"),
    ],
)
def test_noise_of_two_ranks(second: list[int], drawn: Any, found: str) -> None:
    judged = judge_forwards(forwards([1, 2, 3, 4], **drawn), forwards(second, **drawn))
    assert isinstance(judged, Finding) == bool(found), judged
    if isinstance(judged, Finding):
        assert judged.is_note
        assert found in judged.why


def test_equal_noise_of_two_ranks_of_which_none_is_rank_0() -> None:
    other, own = ([10 * step + state for step in range(4)] for state in (0, 1))
    ranks = [forwards(states, drew=["torch"]) for states in (other, own, own)]
    judged = judge_forwards(*ranks)
    assert isinstance(judged, Finding)
    assert list(judged.ranks) == [1, 2]


@pytest.mark.parametrize(
    ("worker", "state", "found"), [(1, 5, Finding), (1, 6, NoFault), (None, 5, Finding)]
)
def test_workers_that_draw_for_their_samples(worker: int | None, state: int, found: type) -> None:
    log = log_of(DIVIDED, [range(8)])
    loads = [
        replace(
            event,
            worker=worker and own,
            random={"numpy": (own and state) or 5},
            drew={"numpy": 7},
        )
        for own, event in enumerate(log.fetches)
    ]
    ranks = [replace(log, fetches=loads)] + [replace(log, fetches=loads if worker is None else [])]
    judged = random_numbers(case_of(ranks))
    assert isinstance(judged, found), judged
