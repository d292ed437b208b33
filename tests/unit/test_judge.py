"""The verdict on a record: bottlenecks are named with their gain, and a healthy run gets no advice."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.clock import judge as clock_judge
from paceline.clock.judge import Finding
from paceline.clock.record import Record, Window
from paceline.clock.step_clock import PHASES

RUN: dict[str, Any] = {
    "step": 0,
    "cores": 8,
    "world_size": 2,
    "local_world_size": 2,
    "workers": 0,
    "strategy": "DDP",
    "compress": False,
}
HEALTHY = {
    "data": 0.002,
    "forward": 0.03,
    "backward": 0.06,
    "communication": 0.003,
    "optimizer": 0.005,
}
WAITING = HEALTHY | {"communication": 0.053}


def judge(made: Record) -> list[Finding]:
    """The findings of a run that is long enough."""
    found = clock_judge.judge(made)
    assert found is not None
    return found


def record(
    *ranks: dict[str, float], windows: int = 6, exposed_s: float = 0.003, **run: Any
) -> Record:
    """Of a run in which a rank spends these seconds in the phases of a step."""
    made = []
    for number in range(windows):
        spent = {p: [10 * rank.get(p, 0.0) for rank in ranks] for p in PHASES}
        if not number:  # the warm-up
            spent["forward"] = [10 * s for s in spent["forward"]]
        made.append(
            Window(
                step=10 * (number + 1),
                steps=10,
                time=1.0 + number,
                samples=640,
                spent_s=spent,
                exposed_s=exposed_s,
                memory_bytes=[1e9] * len(ranks),
                busy=[0.9] * len(ranks),
            )
        )
    return Record(runs=[RUN | run], windows=made)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_healthy_run_gets_no_advice(ranks: int) -> None:
    assert judge(record(*[HEALTHY] * ranks)) == []


def test_only_the_newest_start_is_judged_and_only_if_it_is_long_enough() -> None:
    slow = HEALTHY | {"data": 0.2}
    assert clock_judge.judge(Record(runs=[], windows=[])) is None
    assert clock_judge.judge(record(slow, slow, windows=3)) is None
    assert judge(record(slow, slow, windows=4))
    assert clock_judge.judge(record(slow, slow, step=30)) is None
    assert judge(record(slow, slow, step=20))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_that_wait_for_data(ranks: int) -> None:
    (found,) = judge(record(*[HEALTHY | {"data": 0.2}] * ranks, local_world_size=ranks))
    where = " on all ranks" * (ranks > 1)
    assert found.kind == "data"
    assert found.title == f"input-bound: 67 % of the step waits for data{where}"
    assert found.fix == f"Batches(..., workers={8 // ranks})"
    assert found.gain == pytest.approx(0.298 / 0.098, rel=0.01)
    assert str(found).endswith("a step would take 33 % of its time (3.0 times as fast)")


@pytest.mark.parametrize(
    ("run", "fix"),
    [
        ({"workers": 0, "cores": 2}, "Batches(..., workers=1)"),
        ({"workers": 2, "dataloader": True}, "DataLoader(..., num_workers=4)"),
        ({"workers": 4}, "make the samples cheaper, because 4 workers "),
    ],
)
def test_more_workers_are_advised_while_cores_are_free(run: dict[str, Any], fix: str) -> None:
    slow = HEALTHY | {"data": 0.2}
    (found,) = judge(record(slow, slow, **run))
    assert found.fix.startswith(fix)


def test_data_that_a_slower_rank_hides_is_not_blamed() -> None:
    loading = HEALTHY | {"data": 0.052, "communication": 0.053}
    slow = HEALTHY | {"forward": 0.13}
    (found,) = judge(record(loading, slow))
    assert found.kind == "straggler"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_one_rank_that_waits_for_data(ranks: int) -> None:
    slow = HEALTHY | {"data": 0.052}
    (found,) = judge(record(*[WAITING] * (ranks - 1), slow))
    assert found.title == f"input-bound: 35 % of the step waits for data on rank {ranks - 1}"


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("phase", ["forward", "other"])
def test_a_slow_rank_is_named_with_its_phase(ranks: int, phase: str) -> None:
    slow = HEALTHY | {phase: HEALTHY.get(phase, 0.0) + 0.05}
    (found,) = judge(record(*[WAITING] * (ranks - 1), slow))
    assert found.kind == "straggler"
    assert found.title.startswith(f"rank {ranks - 1} is slow: the others wait 50 ms")
    where = "the rest of the loop" if phase == "other" else phase
    assert f" ({where} takes " in found.title
    assert found.gain == pytest.approx(0.15 / 0.1)


def test_a_slow_host_is_named_with_its_ranks() -> None:
    slow = HEALTHY | {"forward": 0.08}
    (found,) = judge(record(WAITING, WAITING, slow, slow, WAITING, WAITING))
    assert found.title == (
        "ranks 2 and 3 are slow: the others wait 50 ms in each step of 150 ms "
        "(forward takes 80 ms on rank 2, 30 ms on the others)"
    )


def test_ranks_that_are_late_in_turn_are_no_stragglers() -> None:
    """On a busy host each rank waits half of the time, although the communication takes 3 ms."""
    first = record(HEALTHY | {"communication": 0.04}, HEALTHY | {"forward": 0.07})
    second = record(HEALTHY | {"forward": 0.07}, HEALTHY | {"communication": 0.04})
    windows = [w for pair in zip(first.windows, second.windows, strict=True) for w in pair]
    assert judge(Record(runs=first.runs, windows=windows)) == []
    mixed = HEALTHY | {"communication": 0.03}
    assert judge(record(mixed, mixed)) == []


BOUND = HEALTHY | {"communication": 0.1}


def test_ranks_that_all_wait_in_the_same_step_communicate() -> None:
    (found,) = judge(record(BOUND, BOUND, exposed_s=0.09))
    assert found.kind == "communication"
    assert found.title == "communication-bound: each step of 197 ms waits 90 ms for communication"
    assert found.fix.startswith('ddp(..., compress="bf16")')
    assert found.gain == pytest.approx(0.197 / 0.107)
    (compressed,) = judge(record(BOUND, BOUND, exposed_s=0.09, compress=True))
    assert compressed.fix.startswith("a larger global_batch")


@pytest.mark.parametrize(
    "run", [{"strategy": "FSDP"}, {"mesh": "Mesh(tp=2)"}, {"cores": 1}, {"exposed_s": 0.02}]
)
def test_waits_that_may_have_another_cause_are_not_communication(run: dict[str, Any]) -> None:
    assert judge(record(BOUND, BOUND, **({"exposed_s": 0.09} | run))) == []


@pytest.mark.parametrize("name", [name for name in RUN if name != "strategy"])
def test_a_field_may_be_unknown(name: str) -> None:
    made = record(BOUND | {"data": 0.1}, BOUND | {"data": 0.1}, exposed_s=0.09)
    del made.runs[0][name]
    kinds = {finding.kind for finding in judge(made)}
    assert kinds == ({"data"} if name == "cores" else {"data", "communication"})


def test_saves_that_the_steps_wait_for() -> None:
    rank = HEALTHY | {"checkpoint": 0.1}
    (found,) = judge(record(rank, rank))
    assert found.title == "checkpoints take 50 % of the time"
    assert found.gain == pytest.approx(2)
