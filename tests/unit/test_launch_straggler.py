"""From the times at which ranks entered collectives to the rank that holds the others up."""

from __future__ import annotations

import gc
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import pytest

from paceline.launch.straggler_watch import Pace
from paceline.watch import lateness
from paceline.watch.lateness import Enters, Key, Step, suspect, suspects
from paceline.watch.probe import Probe, _kind_of
from paceline.watch.processes import Moment, Process
from paceline.watch.straggler import Part, Profile, Straggler, judge, parts, render

BEGUN_NS = 10**18
Work = Callable[[int, int], float]  # rank, step -> seconds of own work
Ops = list[tuple[float, int, bool]]  # the share of the work before it, elements, whether it blocks


def enters(
    work: Work,
    steps: int,
    *,
    world: int = 2,
    ops: Callable[[int], Ops] = lambda _: [(1, 1000, True)],
) -> Enters:
    """Of a job whose steps have these collectives; one that blocks takes 2 ms."""
    found: dict[int, dict[Key, tuple[int, int]]] = {rank: {} for rank in range(world)}
    now, number = [0.0] * world, 0
    for step in range(steps):
        for share, elements, blocks in ops(step):
            number += 1
            for rank in range(world):
                now[rank] += work(rank, step) * share
                found[rank]["0", number] = (BEGUN_NS + int(now[rank] * 1e9), elements)
            if blocks:
                now = [max(now) + 0.002] * world
    return found


def buckets(count: int, *, blocking: bool = False) -> Callable[[int], Ops]:
    """The work of a step is spread over so many, of which at least the last one is waited for."""
    return lambda _: [(1 / count, 1000 + n, blocking or n == count - 1) for n in range(count)]


def slow(factor: float, *, rank: int = 1, every: int = 1) -> Work:
    """One rank does more in each step, or much more in every so many of them."""

    def work(number: int, step: int) -> float:
        more = every * (factor - 1) * (number == rank and step % every == 0)
        return 0.1 * (1 + more) * random.Random(1000 * number + step).uniform(0.97, 1.03)

    return work


def read_steps(entered: Enters, group: str = "0") -> list[Step]:
    return lateness.read_steps(entered, group)


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("blocking", [False, True])
def test_a_slow_rank_is_suspected_within_thirty_steps(
    world: int, count: int, blocking: bool
) -> None:
    entered = enters(slow(1.3), 30, world=world, ops=buckets(count, blocking=blocking))
    assert suspect(read_steps(entered)) == 1


def test_steps_are_the_periods_of_the_pattern() -> None:
    steps = read_steps(enters(slow(1.3), 30, ops=buckets(5)))
    assert len(steps) in (28, 29)
    assert statistics.fmean(step.length_s for step in steps) == pytest.approx(0.132, rel=0.02)
    # Five asynchronous buckets of a step have one wait, not five: the largest.
    assert statistics.fmean(step.most[1] for step in steps) == pytest.approx(0.03, rel=0.1)
    assert statistics.fmean(step.total[1] for step in steps) > 0.06


def test_what_is_logged_now_and_then_does_not_change_the_pattern() -> None:
    def ops(step: int) -> Ops:
        return buckets(2)(step) + [(0.0, 1, True)] * (step % 7 == 0)

    steps = read_steps(enters(slow(1.3), 40, ops=ops))
    assert 38 <= len(steps) <= 39
    assert suspect(steps) == 1


def test_a_wait_before_a_barrier_counts() -> None:
    # The gradients then come together.
    steps = read_steps(enters(slow(1.5), 40, ops=lambda _: [(1.0, 0, True), (0.0, 1000, True)]))
    assert suspect(steps) == 1


def test_who_is_late_only_since_it_waits_for_another_is_not_named() -> None:
    # Ranks 0-1 meet after each rank's own work, then all four; rank 1 is slow.
    entered = enters(slow(1.5), 40, world=4)
    for number in range(1, 41):
        at = [entered[rank]["0", number][0] for rank in range(4)]
        for rank in (0, 1):
            entered[rank]["1", number] = (at[rank], 500)  # type: ignore[index]
            entered[rank]["0", number] = (max(at[:2]) + 10**6, 1000)  # type: ignore[index]
    assert [rank for rank, _ in suspects(entered)] == [1]


def test_collectives_that_are_missing_part_the_steps() -> None:
    entered = enters(slow(1.3), 120, ops=buckets(2))
    for each in entered.values():  # as where a recorder has wrapped between two looks
        for number in range(100, 140):
            del each["0", number]  # type: ignore[attr-defined]
    del entered[0]["0", 1]  # type: ignore[attr-defined]
    steps = read_steps(entered)
    assert 95 <= len(steps) <= 99
    assert max(step.length_s for step in steps) < 0.2
    assert suspect(steps) == 1


def test_what_has_no_pattern_is_not_judged() -> None:
    entered = enters(slow(2.0), 60)
    for each in entered.values():
        for key, (at_ns, _) in each.items():
            each[key] = (at_ns, 1000 + 7 * key[1])  # type: ignore[index]
    assert read_steps(entered) == []


@pytest.mark.parametrize(("every", "steps"), [(1, 30), (2, 40), (5, 120), (10, 200)])
def test_what_comes_seldom_takes_longer_to_be_sure_of(every: int, steps: int) -> None:
    assert suspect(read_steps(enters(slow(1.4, every=every), steps))) == 1


def test_one_long_pause_makes_no_straggler() -> None:
    def work(rank: int, step: int) -> float:
        return slow(1.0)(rank, step) + 20.0 * (rank == 1 and step == 60)

    for count in range(30, 120, 10):
        assert suspect(read_steps(enters(work, count))) is None


@pytest.mark.parametrize("world", [2, 3, 4])
def test_pauses_now_and_then_do_not_hide_a_slow_rank(world: int) -> None:
    def work(rank: int, step: int) -> float:
        paused = step % 13 == 5 and rank == step % world  # so no 20 steps are without
        return slow(1.5)(rank, step) + 0.8 * paused

    assert suspect(read_steps(enters(work, 60, world=world))) == 1


def test_a_rank_that_alternates_is_none() -> None:
    work = [slow(1.5, rank=0), slow(1.5, rank=1)]
    assert suspect(read_steps(enters(lambda r, s: work[s % 2](r, s), 100))) is None


NOISE: dict[str, Callable[[random.Random], float]] = {
    "machine": lambda dice: dice.gauss(0.1, 0.005),
    "hiccups": lambda dice: 0.1 + (0.5 if dice.random() < 0.05 else 0.0),
    "lengths": lambda dice: 0.1 * dice.lognormvariate(0, 0.5),
    "tiny": lambda dice: dice.uniform(1e-4, 5e-4),
}


@pytest.mark.parametrize(("kind", "world"), [*((kind, 2) for kind in NOISE), ("lengths", 4)])
def test_chance_makes_no_straggler(kind: str, world: int) -> None:
    """Healthy runs, looked at every 20 steps. Of 1800 longer ones none came to a verdict."""
    alarms = 0
    for seed in range(20):
        dice = random.Random(seed)
        drawn = [[NOISE[kind](dice) for _ in range(130)] for _ in range(world)]
        steps = read_steps(enters(lambda r, s: drawn[r][s], 130, world=world))  # noqa: B023
        alarms += any(suspect(steps[:count]) is not None for count in range(20, 129, 20))
    assert alarms == 0


def profile(waiting: float = 0.0, seconds: float = 9.0, **spent: float) -> Profile:
    """Shares of each moment; the rest is backward."""
    rest = 1.0 - waiting - sum(spent.values())
    told = [("waiting", "", waiting), ("backward", "/a/train.py:9 in <module>", rest)]
    told += [(phase, f"/a/train.py:5 in {phase}", share) for phase, share in spent.items()]
    moments = int(seconds / 0.01)
    return Profile(
        BEGUN_NS, [(phase, place, share * 0.01) for phase, place, share in told] * moments
    )


def judged(work: Work, *profiles: Profile) -> Straggler | None:
    entered = enters(work, 60, world=len(profiles))
    steps = read_steps(entered)
    return judge(1, parts(steps, dict(enumerate(profiles))), steps)


def test_a_wait_that_hides_in_a_backward() -> None:
    # Others are in their backwards for longer: that is where DDP waits.
    found = judged(slow(1.5), profile(data=0.02), profile(data=0.35), profile(data=0.02))
    assert found is not None
    assert found.factor == pytest.approx(1.5, rel=0.05)
    assert (found.phase, found.place) == ("data", "/a/train.py:5 in data")
    assert found.step_s == pytest.approx(0.152, rel=0.02)
    assert found.wait_s == pytest.approx(0.05, rel=0.1)
    assert found.phase_s == pytest.approx((0.053, 0.003), rel=0.1)


def test_a_slow_backward_is_told_from_waiting_in_one() -> None:
    found = judged(slow(1.5), profile(forward=0.33), profile(forward=0.36))
    assert found is not None
    assert found.phase == "backward"
    # Where waiting shows, it is in no phase.
    found = judged(slow(1.5), profile(0.34, forward=0.33), profile(0.01, forward=0.33))
    assert found is not None
    assert found.phase == "backward"
    assert found.phase_s == pytest.approx((0.1, 0.05), rel=0.1)


def test_waits_that_add_up_are_seen_in_the_profile() -> None:
    # Of ten blocking collectives in a step each has a little: too little for the largest to prove it.
    shares = profile(0.30, forward=0.3), profile(0.0, forward=0.45)
    entered = enters(slow(1.5), 60, ops=buckets(10, blocking=True))
    steps = read_steps(entered)
    found = judge(1, parts(steps, dict(enumerate(shares))), steps)
    assert found is not None
    assert found.factor == pytest.approx(1.43, rel=0.02)


def test_asynchronous_waits_are_not_proven_by_their_sum() -> None:
    steps = read_steps(enters(slow(1.08), 60, ops=buckets(10)))
    assert suspect(steps) == 1
    assert judge(1, parts(steps, {0: profile(), 1: profile()}), steps) is None


def test_less_than_a_millisecond_is_the_machines_unrest() -> None:
    assert suspect(read_steps(enters(lambda r, s: slow(1.8)(r, s) / 100, 60))) is None
    assert suspect(read_steps(enters(lambda r, s: slow(1.8)(r, s) / 50, 60))) == 1


Phases = Callable[[int, int], dict[str, float]]  # rank, step -> seconds, in turn


def watched(
    phases: Phases, first: int, last: int, *, world: int = 2
) -> tuple[list[Step], list[Part]]:
    """All steps until `last`, and those that were looked at, which have a part of another at each end."""
    entered = enters(lambda r, s: sum(phases(r, s).values()), last + 1, world=world)
    ends = [max(entered[rank]["0", n][0] for rank in entered) for n in range(1, last + 2)]
    profiles = {}
    for rank in range(world):
        spent = [("waiting", "", 0.01)]
        for step in range(first, last):
            own = phases(rank, step)
            spent += [(phase, f"/a/train.py:5 in {phase}", took) for phase, took in own.items()]
            spent += [("waiting", "", (ends[step] - ends[step - 1]) / 1e9 - sum(own.values()))]
        profiles[rank] = Profile(ends[first - 1] - 10**7, [*spent, ("waiting", "", 0.01)])
    steps = read_steps(entered)
    return steps, parts(steps, profiles)


def of_steps(kind: str, factor: float = 1.5, every: int = 1) -> Phases:
    """Rank 1 is slow in one phase."""

    def phases(rank: int, step: int) -> dict[str, float]:
        took = {"data": 0.001, "forward": 0.02, "backward": 0.02}
        took[kind] += (rank == 1 and step % every == 0) * every * 0.04 * (factor - 1)
        return took

    return phases


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("paused", ["data", "forward", "backward"])
@pytest.mark.parametrize("kind", ["data", "forward", "backward"])
def test_pauses_while_ranks_are_looked_at_change_nothing(
    kind: str, paused: str, world: int
) -> None:
    for rank in range(world):

        def phases(number: int, step: int, rank: int = rank) -> dict[str, float]:
            took = of_steps(kind)(number, step)
            took[paused] += 0.3 * (number == rank and step in (32, 34, 37))  # of seven steps
            return took

        steps, found = watched(phases, 30, 38, world=world)
        assert suspect(steps) in (1, rank)
        told = judge(1, found, steps)
        assert told is not None
        assert not told.seldom
        assert (told.phase, told.place) == (kind, f"/a/train.py:5 in {kind}")
        assert told.factor == pytest.approx(1.5, rel=0.05)
        assert told.wait_s == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("every", [2, 3, 5])
@pytest.mark.parametrize("kind", ["data", "forward", "backward"])
def test_what_comes_now_and_then_is_seen_in_the_mean(kind: str, every: int) -> None:
    steps, found = watched(of_steps(kind, every=every), 60, 84)
    told = judge(1, found, steps)
    assert told is not None
    assert (told.phase, told.seldom) == (kind, True)
    assert told.factor == pytest.approx(1.5, rel=0.1)


def test_a_part_has_several_steps_where_there_are_many() -> None:
    _, found = watched(of_steps("data"), 30, 100)
    assert len(found) == 8
    assert all(part.in_phase(1, "data") == pytest.approx(0.021, rel=0.02) for part in found)
    assert len(watched(of_steps("data"), 30, 35)[1]) == 5
    assert watched(of_steps("data"), 30, 34)[1] == []


def test_what_is_not_enough() -> None:
    assert judged(slow(1.1), profile(), profile()) is None
    steps = read_steps(enters(slow(2.0), 60))
    assert parts(steps, {0: profile(), 1: profile()})
    assert parts(steps, {1: profile()}) == []
    # Only whole steps count that all were looked at in, and there are too few.
    assert parts(steps, {0: profile(), 1: profile(seconds=0.9)}) == []
    assert parts(steps, {0: profile(seconds=0.9), 1: profile()}) == []


def process(pid: int, cpu_s: float, name: str = "python", faults: int = 0) -> Process:
    return Process(pid=pid, name=name, state="R", cpu_s=cpu_s, io_bytes=0, faults=faults, core=0)


BEFORE = Moment(
    time_s=0.0,
    processes={n: process(n, 0.0, "stress" if n == 99 else "python") for n in (810, 811, 850, 99)},
    ranks={810: [], 811: [850]},
    delay_s={810: 0.0, 811: 0.0},
    throttled_s=0.0,
    mhz={},
)
AFTER = replace(
    BEFORE,
    time_s=2.0,
    processes={810: process(810, 1.2), 811: process(811, 2.0), 850: process(850, 2)},
)
BUSY = AFTER.processes | {99: process(99, 1.9, "stress")}
SWAPS = AFTER.processes | {811: process(811, 0.1, faults=900)}
HOSTS = [
    (AFTER, "its code, not its host: it used 1.0 cores, and waited for one 0% of the time.", "num_workers"),
    (
        replace(AFTER, processes=BUSY, delay_s={810: 0.1, 811: 0.8}),
        "no core for it 40% of the time; pid 99 (stress) uses 0.9 of one.",
        "cores of their own",
    ),
    (replace(AFTER, delay_s={810: 0.8, 811: 0.8}), "not its host", "num_workers"),
    (replace(AFTER, throttled_s=0.5), "control group held ranks up 25%", "raise the limit"),
    (replace(AFTER, processes=SWAPS), "450 pages of its memory a second", "memory is enough"),
    (
        replace(AFTER, mhz={810: 3100.0, 811: 1200.0}),
        "runs at 1200 MHz, those of the others at 3100",
        "cooling",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("after", "why", "fix"), HOSTS)
def test_what_the_host_did(after: Moment, why: str, fix: str) -> None:
    found = Straggler(1, 1.42, 0.104, 0.031, "data", (0.035, 0.004), "")
    text = render(found, "host a, pid 811", "__getitem__() at train.py:33", BEFORE, after, 811)
    lines = text.splitlines()
    assert lines[:2] == [
        "slow: rank 1 (host a, pid 811) takes 1.42x the time of the others: they wait 31 ms for it in "
        "each step of 104 ms",
        "      data takes 35 ms there, 4 ms elsewhere: __getitem__() at train.py:33",
    ]
    assert why in lines[2]
    assert fix in lines[3]
    assert len(lines) == 4


def test_a_step_of_one_group_says_nothing_of_others() -> None:
    steps = [Step(BEGUN_NS + n, 0.1, {0: 0.0, 1: 0.03}, {0: 0.0, 1: 0.03}) for n in range(30)]
    assert suspect(steps) == 1
    assert suspect(steps[:19]) is None


class Rank:
    """As far as `Pace` sees a rank: it answers at once, with what it has entered by then."""

    def __init__(
        self, rank: int, entered: dict[Key, tuple[int, int]], profiles: Iterable[Profile] = ()
    ) -> None:
        self.rank = rank
        always = profile(seconds=1.5, forward=0.3 + 0.3 * rank)
        self.profiles = chain(profiles, repeat(always))
        self.pid = os.getpid() if rank else os.getppid()
        self.told: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []
        self._entered = [(*key, *at) for key, at in entered.items()]
        self.until = 20  # collectives

    def ask(self, number: int, do: str, **more: Any) -> None:
        self.asked.append(do)
        self.until += 10
        told: dict[str, Any] = {
            "id": number,
            "entered": [one for one in self._entered[: self.until] if one[2] > more["since"]],
        }
        if do == "profile":
            since_ns = self._entered[self.until - 10][2]
            told |= {"since_ns": since_ns, "spent": next(self.profiles).spent}
        self.told[do] = told


class Crew:
    def __init__(self) -> None:
        self.said = ""

    def say(self, text: str) -> None:
        self.said += text


def test_a_straggler_is_said_once() -> None:
    crew: Any = Crew()
    pace = Pace(crew)
    ranks: Any = [Rank(rank, entered) for rank, entered in enters(slow(1.5), 1200).items()]
    for second in range(20, 120):
        pace.look(float(second), ranks, entered=100 * second)
    assert crew.said.count("slow: rank 1 (host ") == 1
    assert "\n      forward takes 90.5 ms there, 45.5 ms elsewhere: " in crew.said
    assert ranks[0].asked.count("profile") == 7  # after 1 s, 2, 4 and so on
    # Nothing has been entered since, so nothing is asked.
    asked = ranks[0].asked.count("pace")
    pace.look(500.0, ranks, entered=100 * 119)
    assert ranks[0].asked.count("pace") == asked


def test_a_pause_while_ranks_are_looked_at_costs_seconds() -> None:
    def work(rank: int, step: int) -> float:
        return slow(1.5)(rank, step) + 0.8 * (rank == 0 and step == 35)

    crew: Any = Crew()
    pace = Pace(crew)
    ranks: Any = [Rank(rank, entered) for rank, entered in enters(work, 300).items()]
    for second in range(20, 28):
        pace.look(float(second), ranks, entered=100 * second)
    assert ranks[0].asked.count("profile") > 1  # the pause was in the first
    assert crew.said.count("slow: rank 1 (host ") == 1


@pytest.mark.parametrize(
    ("seen", "said"), [(["data", "forward", "data"], 0), (["data", "forward", "forward"], 1)]
)
def test_what_is_not_so_in_most_steps_is_said_when_seen_twice(seen: list[str], said: int) -> None:
    def once(phase: str) -> Profile:
        told = [("backward", "", 0.01)] * 70 + [(phase, "", 0.19)] + [("backward", "", 0.01)] * 70
        return Profile(BEGUN_NS, told)

    crew: Any = Crew()
    pace = Pace(crew)
    entered = enters(slow(1.4, every=5), 300)
    ranks: Any = [
        Rank(0, entered[0], [once("waiting")] * 3),  # type: ignore[arg-type]
        Rank(1, entered[1], map(once, seen)),  # type: ignore[arg-type]
    ]
    for second in range(20, 60):
        pace.look(float(second), ranks, entered=100 * second)
        if ranks[0].asked.count("profile") == 4:
            break  # three have been judged
    assert crew.said.count("slow: rank 1 (host ") == said
    assert ("\n      forward takes " in crew.said) == bool(said)


def test_a_rank_that_does_not_answer_is_not_asked_again() -> None:
    crew: Any = Crew()
    pace = Pace(crew)
    ranks: Any = [Rank(rank, entered) for rank, entered in enters(slow(1.5), 60).items()]
    ranks[1].ask = lambda *args, **more: None
    for second in range(20, 60):
        pace.look(float(second), ranks, entered=100 * second)
    assert ranks[0].asked == ["pace"]
    assert not crew.said


FILES = {
    "/v/site-packages/torch/serialization.py": "checkpoint",
    "/v/site-packages/torch/utils/data/_utils/fetch.py": "data",
    "/v/site-packages/torch/autograd/graph.py": "backward",
    "/v/site-packages/torch/autograd/function.py": "",
    "/v/site-packages/torch/optim/adamw.py": "optimizer",
    "/v/site-packages/torch/nn/utils/clip_grad.py": "optimizer",
    "/v/site-packages/torch/nn/modules/module.py": "forward",
    "/me/train.py": "",
}


def test_files_tell_the_phase() -> None:
    phases = ["checkpoint", "data", "backward", "optimizer", "forward", ""]
    for file, phase in FILES.items():
        assert _kind_of(file) == (False, phases.index(phase)), file
    assert _kind_of("/v/site-packages/torch/distributed/distributed_c10d.py")[0]
    assert _kind_of("/v/site-packages/paceline/shm/line.py")[0]
    assert not _kind_of("/v/site-packages/torch/distributed/fsdp/_runtime_utils.py")[0]


def test_a_collection_of_garbage_is_not_taken_for_what_follows() -> None:
    probe: Any = Probe.__new__(Probe)
    probe.main = threading.main_thread().ident
    told: list[dict[str, Any]] = []
    junk: list[list[int]] = [[] for _ in range(100_000)]
    begun = time.perf_counter()
    probe.hear({"do": "profile", "id": 7, "seconds": 0.3, "since": 0}, told.append)
    while not told:
        gc.collect()
        time.sleep(0.002)
    assert len(junk) == 100_000
    spent = told[0]["spent"]
    collected = sum(seconds for phase, _, seconds in spent if phase == "collection of garbage")
    assert told[0]["id"] == 7
    in_all = sum(seconds for _, _, seconds in spent)
    assert 0.3 < collected / in_all < 1
    assert 0.3 <= in_all < time.perf_counter() - begun
    assert all(seconds > -1e-3 for _, _, seconds in spent)
