"""Stragglers, found from the times at which ranks enter collectives and from stack samples."""

from __future__ import annotations

import gc
import os
import random
import re
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import paceline
from paceline.clock.checks.stragglers import Straggler
from paceline.launch.straggler_watch import StragglerWatch
from paceline.watch.probe import Probe
from paceline.watch.processes import HostSample
from paceline.watch.sampling import PHASES as SAMPLED
from paceline.watch.sampling import classify
from paceline.watch.straggler import (
    Arrivals,
    Key,
    Profile,
    Suspect,
    describe,
    find_straggler,
    find_suspects,
    profiled_blocks,
    read_steps,
)

BEGIN_NS = 10**18
Work = Callable[[int, int], float]  # rank, step -> seconds of own work
Ops = list[tuple[float, int, bool]]  # the share of the work before it, elements, whether it blocks


def arrivals(
    work: Work,
    steps: int,
    *,
    world: int = 2,
    ops: Callable[[int], Ops] = lambda _: [(1, 1000, True)],
) -> Arrivals:
    """Of a job whose steps have these collectives; one that blocks takes 2 ms."""
    found: dict[int, dict[Key, tuple[int, int]]] = {rank: {} for rank in range(world)}
    now, number = [0.0] * world, 0
    for step in range(steps):
        for share, elements, blocks in ops(step):
            number += 1
            for rank in range(world):
                now[rank] += work(rank, step) * share
                found[rank]["0", number] = (BEGIN_NS + int(now[rank] * 1e9), elements)
            if blocks:
                now = [max(now) + 0.002] * world
    return found


def buckets(count: int, *, blocking: bool = False) -> Callable[[int], Ops]:
    """The work of a step is spread over so many collectives, of which at least the last one blocks."""
    return lambda _: [(1 / count, 1000 + n, blocking or n == count - 1) for n in range(count)]


def slow(factor: float, *, rank: int = 1, every: int = 1) -> Work:
    """One rank does more in each step, or much more in every so many of them."""

    def work(number: int, step: int) -> float:
        more = every * (factor - 1) * (number == rank and step % every == 0)
        return 0.1 * (1 + more) * random.Random(1000 * number + step).uniform(0.97, 1.03)

    return work


def suspect(found: Arrivals) -> int | None:
    """The only suspect, or None."""
    suspects = find_suspects(found)
    assert len(suspects) <= 1
    assert not suspects or len(suspects[0].ranks) == 1
    return suspects[0].ranks[0] if suspects else None


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("blocking", [False, True])
def test_a_slow_rank_is_suspected_within_thirty_steps(
    world: int, count: int, blocking: bool
) -> None:
    assert suspect(arrivals(slow(1.3), 30, world=world, ops=buckets(count, blocking=blocking))) == 1


def test_steps_are_the_periods_of_the_pattern() -> None:
    steps = read_steps(arrivals(slow(1.3), 30, ops=buckets(5)), "0")
    assert len(steps) in (28, 29)
    assert statistics.fmean(step.step_s for step in steps) == pytest.approx(0.132, rel=0.02)
    # Five asynchronous buckets of a step have one wait, not five: the largest.
    assert statistics.fmean(step.longest_wait_s[0] for step in steps) == pytest.approx(
        0.03, rel=0.1
    )
    assert statistics.fmean(step.summed_wait_s[0] for step in steps) > 0.06


@pytest.mark.parametrize("late", [[1], [2, 3], [0, 1, 5]])
def test_ranks_that_are_equally_slow_are_suspected_together(late: list[int]) -> None:
    work = [slow(1.5 if rank in late else 1.0, rank=rank) for rank in range(6)]
    (found,) = find_suspects(arrivals(lambda r, s: work[r](r, s), 30, world=6, ops=buckets(3)))
    assert sorted(found.ranks) == late


DEGREES = {1: 1.6, 4: 1.4, 6: 1.2}


@pytest.mark.parametrize("noise", [0.02, 0.05])
@pytest.mark.parametrize("degrees", [DEGREES, {1: 2.5, 4: 2.0, 6: 1.5}, {1: 1.5, 4: 1.25}])
def test_of_ranks_that_are_slow_to_different_degrees_the_slowest_is_suspected(
    noise: float, degrees: dict[int, float]
) -> None:
    dice = random.Random(3)
    drawn = [
        [0.1 * degrees.get(rank, 1.0) * dice.gauss(1.0, noise) for _ in range(150)]
        for rank in range(8)
    ]
    for count in range(30, 150, 5):
        (found,) = find_suspects(arrivals(lambda r, s: drawn[r][s], count, world=8, ops=buckets(3)))
        assert found.ranks == [1]


def _logged(step: int) -> Ops:
    return buckets(2)(step) + [(0.0, 1, True)] * (step % 7 == 0)


@pytest.mark.parametrize(
    "ops",
    [_logged, lambda _: [(1.0, 0, True), (0.0, 1000, True)]],
    ids=["a number is logged now and then", "a barrier comes before the gradients"],
)
def test_small_collectives_do_not_hide_the_pattern(ops: Callable[[int], Ops]) -> None:
    found = arrivals(slow(1.4), 40, ops=ops)
    assert 38 <= len(read_steps(found, "0")) <= 39
    assert suspect(found) == 1


def test_a_rank_that_waits_for_another_in_a_smaller_group_is_not_named() -> None:
    # Ranks 0-1 meet after each rank's own work, then all four; rank 1 is slow.
    found = arrivals(slow(1.5), 40, world=4)
    for number in range(1, 41):
        at = [found[rank]["0", number][0] for rank in range(4)]
        for rank in (0, 1):
            found[rank]["1", number] = (at[rank], 500)  # type: ignore[index]
            found[rank]["0", number] = (max(at[:2]) + 10**6, 1000)  # type: ignore[index]
    assert suspect(found) == 1


def test_missing_collectives_part_the_steps() -> None:
    found = arrivals(slow(1.3), 120, ops=buckets(2))
    for each in found.values():  # as where a recorder has wrapped between two requests
        for number in range(100, 140):
            del each["0", number]  # type: ignore[attr-defined]
    del found[0]["0", 1]  # type: ignore[attr-defined]
    steps = read_steps(found, "0")
    assert 95 <= len(steps) <= 99
    assert max(step.step_s for step in steps) < 0.2
    assert suspect(found) == 1


def test_collectives_without_a_pattern_are_not_judged() -> None:
    found = arrivals(slow(2.0), 60)
    for each in found.values():
        for key, (at_ns, _) in each.items():
            each[key] = (at_ns, 1000 + 7 * key[1])  # type: ignore[index]
    assert read_steps(found, "0") == []


@pytest.mark.parametrize("every", [2, 5, 10])
def test_a_rank_that_is_slow_in_some_steps_only_is_found_in_blocks_of_ten(every: int) -> None:
    assert suspect(arrivals(slow(1.4, every=every), 120)) is None
    assert suspect(arrivals(slow(1.4, every=every), 220)) == 1


def test_one_long_pause_makes_no_straggler() -> None:
    def work(rank: int, step: int) -> float:
        return slow(1.0)(rank, step) + 20.0 * (rank == 1 and step == 60)

    for count in range(30, 300, 10):
        assert suspect(arrivals(work, count)) is None


@pytest.mark.parametrize("world", [2, 3, 4])
def test_pauses_now_and_then_do_not_hide_a_slow_rank(world: int) -> None:
    def work(rank: int, step: int) -> float:
        paused = step % 13 == 5 and rank == step % world
        return slow(1.5)(rank, step) + 0.8 * paused

    assert suspect(arrivals(work, 60, world=world)) == 1


NOISE: dict[str, Callable[[random.Random], float]] = {
    "machine": lambda dice: dice.gauss(0.1, 0.005),
    "pauses": lambda dice: 0.1 + (0.5 if dice.random() < 0.05 else 0.0),
    "lengths": lambda dice: 0.1 * dice.lognormvariate(0, 0.5),
    "tiny": lambda dice: dice.uniform(1e-4, 5e-4),
}


@pytest.mark.parametrize(("kind", "world"), [*((kind, 2) for kind in NOISE), ("lengths", 4)])
def test_chance_makes_no_straggler(kind: str, world: int) -> None:
    """Of 1000 healthy runs of 400 steps, judged every 16 steps, none had a suspect; here are some of them."""
    for seed in range(5):
        dice = random.Random(seed)
        drawn = [[NOISE[kind](dice) for _ in range(260)] for _ in range(world)]
        for count in range(20, 261, 40):
            assert suspect(arrivals(lambda r, s: drawn[r][s], count, world=world)) is None  # noqa: B023


def test_a_rank_that_alternates_with_another_is_no_straggler() -> None:
    work = [slow(1.5, rank=0), slow(1.5, rank=1)]
    assert suspect(arrivals(lambda r, s: work[s % 2](r, s), 300)) is None


def test_less_than_a_millisecond_is_scheduler_noise() -> None:
    assert suspect(arrivals(lambda r, s: slow(1.8)(r, s) / 100, 60)) is None
    assert suspect(arrivals(lambda r, s: slow(1.8)(r, s) / 50, 60)) == 1


PHASES = ["data", "forward", "backward"]
Phases = Callable[[int, int], dict[str, float]]  # rank, step -> seconds, in turn


def phases_of(kind: str, factor: float = 1.5, every: int = 1) -> Phases:
    """Rank 1 is slow in one phase."""

    def phases(rank: int, step: int) -> dict[str, float]:
        took = {"data": 0.001, "forward": 0.02, "backward": 0.02}
        took[kind] += (rank == 1 and step % every == 0) * every * 0.04 * (factor - 1)
        return took

    return phases


def judged(
    phases: Phases, first: int, last: int, *, world: int = 2, shows_waiting: bool = True
) -> tuple[Straggler, str] | None:
    """The verdict after step `last`, with a profile since step `first` and a bit before."""
    found = arrivals(lambda r, s: sum(phases(r, s).values()), last + 1, world=world)
    ends = [max(found[rank]["0", n][0] for rank in found) for n in range(1, last + 2)]
    waiting = "waiting" if shows_waiting else "backward"
    profiles = {}
    for rank in range(world):
        spent = [(waiting, "", 0.01)]
        for step in range(first, last):
            own = phases(rank, step)
            spent += [(phase, f"/a/train.py:5 in {phase}", took) for phase, took in own.items()]
            spent += [(waiting, "", (ends[step] - ends[step - 1]) / 1e9 - sum(own.values()))]
        profiles[rank] = Profile(ends[first - 1] - 10**7, [*spent, (waiting, "", 0.01)])
    (found_suspect,) = find_suspects(found)
    assert found_suspect.ranks == [1]
    if not (blocks := profiled_blocks(found_suspect, profiles)):
        return None
    return find_straggler(found_suspect, 1, profiles, blocks)


@pytest.mark.parametrize("shows_waiting", [True, False])  # DDP waits within a backward
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["data", "forward", "backward"])
def test_the_phase_and_the_line_are_named(kind: str, world: int, shows_waiting: bool) -> None:
    judged_as = judged(phases_of(kind), 30, 38, world=world, shows_waiting=shows_waiting)
    assert judged_as is not None
    found, place = judged_as
    assert (found.ranks, found.phase, place) == ([1], kind, f"/a/train.py:5 in {kind}")
    assert found.factor == pytest.approx(1.5, rel=0.06)
    assert found.wait_s == pytest.approx(0.02, rel=0.01)
    assert found.step_s == pytest.approx(0.063, rel=0.01)
    usual_s = 0.001 if kind == "data" else 0.02
    assert found.phase_s == pytest.approx((usual_s + 0.02, usual_s), abs=0.0021)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("paused", PHASES)
@pytest.mark.parametrize("kind", PHASES)
def test_pauses_during_the_profile_change_nothing(kind: str, paused: str, world: int) -> None:
    for rank in range(world):

        def phases(number: int, step: int, rank: int = rank) -> dict[str, float]:
            took = phases_of(kind)(number, step)
            took[paused] += 0.3 * (number == rank and step in (32, 34, 37))  # of eight steps
            return took

        judged_as = judged(phases, 30, 38, world=world)
        assert judged_as is not None
        found, place = judged_as
        assert (found.phase, place) == (kind, f"/a/train.py:5 in {kind}")
        assert found.factor == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize("kind", ["data", "backward"])
def test_a_phase_that_is_slow_in_some_steps_only(kind: str) -> None:
    judged_as = judged(phases_of(kind, every=5), 200, 290)
    assert judged_as is not None
    found, _ = judged_as
    assert found.phase == kind
    assert found.factor == pytest.approx(1.5, rel=0.1)


def test_many_small_waits_are_seen_in_the_profile() -> None:
    # Ten blocking collectives per step: the largest wait of one is too little to show a factor of 1.2.
    found = arrivals(slow(1.5), 60, ops=buckets(10, blocking=True))
    (one,) = find_suspects(found)
    shares = {0: {"waiting": 0.3, "backward": 0.7}, 1: {"waiting": 0.0, "backward": 1.0}}
    profiles = {
        rank: Profile(BEGIN_NS, [(name, "", s * 0.01) for name, s in spent.items()] * 900)
        for rank, spent in shares.items()
    }
    told = find_straggler(one, 1, profiles, profiled_blocks(one, profiles))
    assert told is not None
    assert told[0].factor == pytest.approx(1.43, rel=0.02)
    # Asynchronous waits add up to much as well, but the profile does not show them.
    (one,) = find_suspects(arrivals(slow(1.08), 60, ops=buckets(10)))
    same = Profile(BEGIN_NS, [("backward", "", 9.0)])
    alike = {0: same, 1: same}
    assert find_straggler(one, 1, alike, profiled_blocks(one, alike)) is None


def test_a_profile_needs_whole_steps_of_all_ranks() -> None:
    one = Suspect([1], read_steps(arrivals(slow(2.0), 60), "0"))
    long, short = (Profile(BEGIN_NS, [("data", "", seconds)]) for seconds in (12.0, 0.9))
    assert len(profiled_blocks(one, {0: long, 1: long})) > 40
    for profiles in ({1: long}, {0: long, 1: short}, {0: short, 1: long}):
        assert profiled_blocks(one, profiles) == []


BEFORE = HostSample(
    time_s=0.0,
    names={810: "python", 811: "python", 850: "python", 99: "stress"},
    cpu_s=dict.fromkeys((810, 811, 850, 99), 0.0),
    job=frozenset({810, 811, 850}),
    delay_s={810: 0.0, 811: 0.0},
    major_faults={810: 0, 811: 0},
    throttled_s=0.0,
)
AFTER = replace(BEFORE, time_s=2.0, cpu_s={810: 1.2, 811: 2.0, 850: 2.0, 99: 0.0})
HOSTS = [
    (
        AFTER,
        "its code, not its host: it used 1.0 cores, and waited for a free core 0% of the time.",
        "num_workers",
    ),
    (
        replace(AFTER, cpu_s=AFTER.cpu_s | {99: 1.9}, delay_s={810: 0.1, 811: 0.8}),  # type: ignore[operator]
        "no free core for it 40% of the time; pid 99 (stress) uses 0.9 cores.",
        "cores of their own",
    ),
    (
        replace(AFTER, delay_s={810: 1.0, 811: 1.1}),
        "its code takes longer, and its host has too few cores: it waited for a free core 55% of the time, "
        "the other ranks 50%.",
        "(num_workers), or make them cheaper; and start fewer ranks or threads",
    ),
    (replace(AFTER, delay_s={810: 0.1, 811: 0.1}), "not its host", "num_workers"),
    (replace(AFTER, throttled_s=0.5), "control group stopped ranks for 25%", "raise the limit"),
    (replace(AFTER, major_faults={810: 0, 811: 900}), "450 pages of its memory per second", "memory"),
]  # fmt: skip


LATE = Straggler(
    ranks=[1], factor=1.42, step_s=0.104, wait_s=0.031, phase="data", phase_s=(0.035, 0.004)
)


@pytest.mark.parametrize(("after", "why", "fix"), HOSTS)
def test_what_the_host_did(after: HostSample, why: str, fix: str) -> None:
    text = describe(LATE, "host a, pid 811", "__getitem__() at train.py:33", BEFORE, after, 811)
    lines = text.splitlines()
    assert lines[:2] == [
        "slow: rank 1 (host a, pid 811) takes 1.42x the time of the others: they wait 31 ms for it in "
        "each step of 104 ms",
        "      data takes 35 ms on it, 4 ms on the others: __getitem__() at train.py:33",
    ]
    assert why in lines[2]
    assert fix in lines[3]
    assert len(lines) == 4


class Rank:
    """As far as `StragglerWatch` sees a rank: it answers at once, with what it has entered by then."""

    def __init__(
        self, rank: int, entered: dict[Key, tuple[int, int]], spent: dict[str, float]
    ) -> None:
        self.rank = rank
        self.pid = os.getpid() if rank else os.getppid()
        self.answers: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []
        self.until = 20  # collectives, one each step
        self.slow_ranks: list[int] = []
        self.returncode = None
        self._entered = [(*key, *at) for key, at in entered.items()]
        self._spent = [(phase, f"/a/train.py:5 in {phase}", s) for phase, s in spent.items()]

    def ask(self, request: dict[str, Any]) -> None:
        do = request["do"]
        self.asked.append(do)
        if do == "slow_ranks":  # whose answers are not read
            self.slow_ranks += request["ranks"]
            return
        begin_ns = self._entered[self.until - 1][2]
        self.until += 10
        told: dict[str, Any] = {
            "id": request["id"],
            "arrivals": [one for one in self._entered[: self.until] if one[2] > request["since"]],
        }
        if do == "profile":
            told |= {"begin_ns": begin_ns, "spent": self._spent * 50}
        self.answers[do] = told

    send = ask


def watched(
    work: Work,
    steps: int,
    seconds: range,
    *,
    world: int = 2,
    spent: Callable[[int], dict[str, float]] = lambda rank: {
        "forward": 0.03 + 0.03 * rank,
        "backward": 0.07,
    },
    silent: bool = False,
) -> tuple[str, list[Any], StragglerWatch]:
    """The output of a watch of a job that takes ten steps a second, the job's ranks, and the watch.

    Args:
        spent: by rank, the seconds of a step in each phase, as profiles show them.
        silent: whether rank 1 answers nothing.
    """
    said: list[str] = []
    watch = StragglerWatch(SimpleNamespace(show=said.append))  # type: ignore[arg-type]
    entered = arrivals(work, steps, world=world)
    ranks: Any = [Rank(rank, dict(entered[rank]), spent(rank)) for rank in entered]
    if silent:
        ranks[1].ask = lambda request: None
    for second in seconds:
        watch.check(float(second), ranks, entered=100 * second)
    return "".join(said), ranks, watch


def test_a_straggler_is_said_once_and_within_fifty_steps() -> None:
    said, ranks, watch = watched(slow(1.5), 1200, range(20, 23))
    assert said.count("slow: rank 1 (host ") == 1
    assert "\n      forward takes " in said
    assert ranks[0].until <= 50
    said, ranks, watch = watched(slow(1.5), 1200, range(20, 120))
    assert said.count("slow: rank 1 (host ") == 1
    assert 5 <= ranks[0].asked.count("profile") <= 7  # after 1 s, 2, 4 and so on
    assert ranks[0].asked.count("slow_ranks") == 1
    # Nothing has been entered since, so nothing is asked.
    asked = len(ranks[0].asked)
    for second in (500.0, 501.0):
        watch.check(second, ranks, entered=100 * 119)
    assert len(ranks[0].asked) <= asked + 1


@pytest.mark.parametrize("factors", [{0: 1.5, 1: 1.5}, {0: 1.45, 1: 1.5}, {0: 1.25, 1: 1.5}])
def test_each_of_several_slow_ranks_is_said_once_with_its_own_phase(
    factors: dict[int, float],
) -> None:
    dice = random.Random(1)
    drawn = [
        [0.1 * factors.get(rank, 1.0) * dice.gauss(1.0, 0.03) for _ in range(1300)]
        for rank in range(4)
    ]

    def spent(rank: int) -> dict[str, float]:
        more = 0.1 * (factors.get(rank, 1.0) - 1)
        return {
            "forward": 0.1 + more * (rank == 0),
            "data": more * (rank == 1),
            "waiting": 0.05 - more,
        }

    said, ranks, _ = watched(lambda r, s: drawn[r][s], 1300, range(20, 140), world=4, spent=spent)
    named = ranks[0].slow_ranks
    assert 1 in named
    assert sorted(named) == [rank for rank in (0, 1) if rank in named]  # each once
    assert factors[0] == 1.25 or sorted(named) == [0, 1]
    for rank, phase in ((0, "forward"), (1, "data")):
        lines = re.findall(rf"^slow: rank {rank} \(.*\n +(\w+) takes .*", said, re.MULTILINE)
        assert lines == [phase] * named.count(rank)
    # After 1 s, 2, 4 and so on, for each rank.
    assert ranks[0].asked.count("profile") <= 14


def test_a_pause_during_the_profile_only_delays_the_verdict() -> None:
    def work(rank: int, step: int) -> float:
        return slow(1.5)(rank, step) + 30.0 * (rank == 0 and step == 33)

    said, ranks, _ = watched(work, 300, range(20, 32))
    assert said.count("slow: rank 1 (host ") == 1
    assert ranks[0].asked.count("profile") > 1


def test_a_rank_that_does_not_answer_is_not_asked_again() -> None:
    said, ranks, _ = watched(slow(1.5), 60, range(20, 60), silent=True)
    assert ranks[0].asked == ["arrivals"]
    assert not said


FILES = {
    "checkpoint": ["/v/site-packages/torch/serialization.py"],
    "data": ["/v/site-packages/torch/utils/data/_utils/fetch.py"],
    "backward": ["/v/site-packages/torch/autograd/graph.py"],
    "optimizer": [f"/v/torch/{file}.py" for file in ("optim/adamw", "nn/utils/clip_grad")],
    "forward": ["/v/site-packages/torch/nn/modules/module.py"],
    "none": ["/v/site-packages/torch/autograd/function.py", "/me/train.py"],
}


def test_files_show_the_phase() -> None:
    for index, files in enumerate(FILES.values()):
        for file in files:
            assert classify(file) == (False, index), file
    assert classify("/v/site-packages/torch/distributed/distributed_c10d.py")[0]
    assert classify("/v/site-packages/paceline/shm/work_queue.py")[0]
    assert not classify("/v/site-packages/torch/distributed/fsdp/_runtime_utils.py")[0]


def test_a_garbage_collection_is_its_own_phase() -> None:
    probe: Any = Probe.__new__(Probe)
    probe.main = threading.main_thread().ident
    told: list[dict[str, Any]] = []
    junk: list[list[int]] = [[] for _ in range(100_000)]
    begun = time.perf_counter()
    probe.answer({"do": "profile", "id": 7, "seconds": 0.3, "since": 0}, told.append)
    while not told:
        gc.collect()
        time.sleep(0.002)
    assert len(junk) == 100_000
    assert told[0]["id"] == 7
    spent = told[0]["spent"]
    collected = sum(seconds for phase, _, seconds in spent if phase == "garbage collection")
    in_all = sum(seconds for _, _, seconds in spent)
    assert 0.3 < collected / in_all < 1
    assert 0.3 <= in_all < time.perf_counter() - begun
    assert all(seconds > -1e-3 for _, _, seconds in spent)


def test_files_of_paceline_that_name_a_phase_exist() -> None:
    source = Path(paceline.__file__).parents[1]
    own = [name for names in SAMPLED.values() for name in names if name.startswith("paceline/")]
    assert own
    assert [name for name in own if not (source / name).exists()] == []
