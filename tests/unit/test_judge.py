"""The verdict on a record: bottlenecks are named with their gain, and a healthy run gets no advice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.clock import judge as clock_judge
from paceline.clock.checks.stragglers import find_late
from paceline.clock.finding import Finding
from paceline.clock.record import Record, Window
from paceline.clock.step_clock import PHASES

RUN: dict[str, Any] = {
    "step": 0,
    "device": "cpu",
    "cores": 8,
    "world_size": 2,
    "local_world_size": 2,
    "data_ranks": 2,
    "global_batch": 64,
    "micro_batch": 64,
    "workers": 0,
    "strategy": "DDP",
    "gradient_bytes": 40 * 2**20,
    "bucket_bytes": 25 * 2**20,
    "compress": False,
}
HEALTHY = {
    "data": 0.002,
    "forward": 0.03,
    "backward": 0.06,
    "communication": 0.003,
    "optimizer": 0.005,
}


def judge(made: Record) -> list[Finding]:
    """The findings of a run that is long enough."""
    found = clock_judge.judge(made)
    assert found is not None
    return found


def record(
    *ranks: dict[str, float],
    windows: int = 6,
    busy: float = 0.9,
    collate_s: float = 0.0,
    load_s: float = 0.0,
    **run: Any,
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
                memory_bytes=[1e9] * len(ranks),
                busy=[busy] * len(ranks),
                cores=[busy] * len(ranks),
                collate_s=[10 * collate_s] * len(ranks),
                load_s=[10 * load_s] * len(ranks),
            )
        )
    return Record(runs=[RUN | run], windows=made)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_healthy_run_gets_no_advice(ranks: int) -> None:
    assert judge(record(*[HEALTHY] * ranks)) == []


def test_a_run_that_is_too_short_gets_none() -> None:
    slow = HEALTHY | {"data": 0.2}
    assert clock_judge.judge(record(slow, slow, windows=3)) is None
    assert judge(record(slow, slow, windows=4))
    assert clock_judge.judge(Record(runs=[], windows=[])) is None


def test_only_the_newest_start_is_judged() -> None:
    slow = HEALTHY | {"data": 0.2}
    assert clock_judge.judge(record(slow, slow, step=30)) is None
    assert judge(record(slow, slow, step=20))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_without_workers_the_gain_is_that_of_loading_ahead(ranks: int) -> None:
    (found,) = judge(record(*[HEALTHY | {"data": 0.2}] * ranks))
    assert found.kind == "data"
    assert found.title == "input-bound: 67 % of the step waits for data" + " on all ranks" * (
        ranks > 1
    )
    assert found.cure == "Batches(..., workers=3)"  # 67 ms each, behind 98 ms
    assert found.gain == pytest.approx(0.298 / 0.098)
    adopted = judge(record(*[HEALTHY | {"data": 0.2}] * ranks, dataloader=True))
    assert adopted[0].cure == "DataLoader(..., num_workers=3)"
    assert str(found).endswith("workers=3), expected 3x")


def test_a_slow_collate_function_is_named() -> None:
    slow = HEALTHY | {"data": 0.2}
    found = judge(record(slow, slow, collate_s=0.15))[0]
    assert found.kind == "collate"
    assert "waits for data on all ranks, 75 % of that in the collate function" in found.title


def test_a_file_of_an_older_version_is_judged() -> None:
    slow = HEALTHY | {"data": 0.2}
    old = record(slow, slow)
    old.windows[:] = [replace(w, cores=[], collate_s=[]) for w in old.windows]
    assert judge(old)[0].kind == "data"


def test_busy_workers_need_more() -> None:
    slow = {"data": 0.063, "forward": 0.037}
    found = judge(record(slow, slow, workers=2, busy=0.3, load_s=0.2))[0]
    assert "63 % of the step waits for data on all ranks, 2 workers busy 100 %" in found.title
    assert found.cure == "Batches(..., workers=7)"
    assert found.gain == pytest.approx(0.1 / 0.037)


def test_workers_that_have_time_left_are_enough() -> None:
    # The rank waits, but for what more workers do not make shorter: to receive a batch, or to start.
    slow = {"data": 0.03, "forward": 0.07}
    assert judge(record(slow, slow, workers=2, load_s=0.001)) == []
    assert judge(record(slow, slow, workers=2, load_s=0.15)) == []
    found = judge(record(slow, slow, workers=2, busy=0.3, load_s=0.18))[0]
    assert found.title.endswith("2 workers busy 90 %")
    assert found.gain == pytest.approx(0.1 / 0.07)
    old = record(slow, slow, workers=2, load_s=0.2)
    old.windows[:] = [replace(w, load_s=[]) for w in old.windows]
    assert judge(old) == []  # of an older version, which did not measure the workers


@pytest.mark.parametrize(("workers", "load_s"), [(16, 1.4), (18, 1.45)])
@pytest.mark.parametrize("cores", [2, 8])
def test_as_many_workers_as_now_are_no_advice(workers: int, load_s: float, cores: int) -> None:
    slow = {"data": 0.063, "forward": 0.037}
    assert judge(record(slow, slow, workers=workers, cores=cores, busy=0.3, load_s=load_s)) == []


def test_equally_slow_workers_may_show_on_one_rank() -> None:
    waiting = {"data": 0.001, "forward": 0.035, "communication": 0.015}
    slow = {"data": 0.015, "forward": 0.035, "communication": 0.001}
    (found,) = judge(record(waiting, slow, workers=1, load_s=0.051))
    assert (
        found.title == "input-bound: 29 % of the step waits for data on rank 1, 1 worker busy 100 %"
    )
    assert found.cure == "Batches(..., workers=2)"
    assert found.gain == pytest.approx(0.051 / 0.036)
    assert judge(record(waiting, slow, workers=0))[0].kind == "straggler"


def test_cores_limit_the_gain_of_workers() -> None:
    slow = HEALTHY | {"data": 0.2}
    found = judge(record(slow, slow, cores=2, busy=0.6))[0]  # 0.6 of each core already
    assert found.gain == pytest.approx(0.9 / 0.6)
    assert found.cure == "Batches(..., workers=2)"
    full = judge(record(slow, slow, cores=2, busy=0.95))[0]
    assert full.cure == "samples that cost less, or 4 cores with Batches(..., workers=2)"
    assert full.gain == pytest.approx(2 * 0.9 / 0.95)
    assert "The 2 cores of the host are busy" in full.details
    some = HEALTHY | {"data": 0.02}
    assert judge(record(some, some, cores=2, busy=0.95)) == []


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("phase", ["data", "forward", "other"])
def test_a_slow_rank_is_named_with_its_phase(ranks: int, phase: str) -> None:
    waiting = HEALTHY | {"communication": 0.053}
    slow = HEALTHY | {phase: HEALTHY.get(phase, 0.0) + 0.05}
    first = judge(record(*[waiting] * (ranks - 1), slow))[0]
    assert first.kind == "straggler"
    assert first.title.startswith(
        f"rank {ranks - 1} takes 1.52x the time of the others: they wait 50 ms"
    )
    where = "the rest of the loop" if phase == "other" else phase
    assert f" ({where} takes " in first.title
    assert first.gain == pytest.approx(0.15 / 0.1)


def test_a_slow_host_is_named_with_its_ranks() -> None:
    waiting = HEALTHY | {"communication": 0.053}
    slow = HEALTHY | {"forward": 0.08}
    found = judge(record(waiting, waiting, slow, slow, waiting, waiting))[0]
    assert found.kind == "straggler"
    assert found.title == (
        "ranks 2 and 3 take 1.52x the time of the others: they wait 50 ms for them in each step of 150 ms "
        "(forward takes 80 ms on them, 30 ms on the others)"
    )


@pytest.mark.parametrize("factors", [(2.5, 2.0, 1.5), (1.6, 1.4, 1.2)])
def test_of_ranks_that_are_slow_to_different_degrees_the_slowest_is_named(
    factors: tuple[float, ...],
) -> None:
    forward_s = [0.1 * factor for factor in (1.0, *factors, 1.0, 1.0, 1.0, 1.0)]
    made = [{"forward": s, "communication": 0.1 * factors[0] - s} for s in forward_s]
    (found,) = judge(record(*made))
    assert found.title.startswith(f"rank 1 takes {factors[0]:.2f}x the time of the others: ")
    assert found.gain == pytest.approx(factors[0] / factors[1])


def test_ranks_that_are_slow_for_different_reasons_are_not_averaged() -> None:
    waiting = {"forward": 0.1, "communication": 0.03}
    script = {"forward": 0.1, "other": 0.025, "communication": 0.005}
    (found,) = judge(record(script, waiting, {"forward": 0.1, "data": 0.03}, waiting, waiting))
    assert found.title == (
        "rank 2 takes 1.30x the time of the others: they wait 30 ms for it in each step of 130 ms "
        "(data takes 30 ms on it, 0 ms on the others)"
    )
    assert found.gain == pytest.approx(1.3)
    assert "includes rank 0, which" in found.details


def test_ranks_that_are_late_in_turn_are_no_stragglers() -> None:
    first = record(HEALTHY | {"communication": 0.04}, HEALTHY | {"forward": 0.07})
    second = record(HEALTHY | {"forward": 0.07}, HEALTHY | {"communication": 0.04})
    windows = [w for pair in zip(first.windows, second.windows, strict=True) for w in pair]
    assert judge(Record(runs=first.runs, windows=windows)) == []


SLOW_LINK = HEALTHY | {"communication": 0.1}


def test_accumulation_communicates_less_often() -> None:
    link = {"latency_s": 0.09, "bytes_per_s": 8e9}
    found = judge(record(SLOW_LINK, SLOW_LINK, link=link, bucket_bytes=2**30))
    assert [f.kind for f in found] == ["accumulation"]
    assert found[0].title == (
        "communication-bound: each step of 197 ms waits 100 ms for communication"
    )
    assert str(found[0]).endswith("x (a larger batch, which is another training)")
    assert found[0].cure == "Batches(..., global_batch=256, micro_batch=32)"
    assert found[0].gain == pytest.approx(4 * 0.197 / (4 * 0.092 + 0.105))
    assert "learning rate" in found[0].details


def test_little_communication_is_not_blamed_for_a_slow_optimizer() -> None:
    rank = HEALTHY | {"communication": 0.012, "optimizer": 0.03}
    link = {"latency_s": 1e-3, "bytes_per_s": 400e6}
    assert judge(record(rank, rank, link=link)) == []


def test_compression_halves_the_transfer() -> None:
    link = {"latency_s": 1e-3, "bytes_per_s": 400e6}  # 42 MB in 105 ms
    found = {f.kind: f for f in judge(record(SLOW_LINK, SLOW_LINK, link=link))}
    assert set(found) == {"accumulation", "communication"}
    assert found["communication"].cure == 'ddp(..., compress="bf16")'
    assert found["communication"].gain == pytest.approx(0.197 / (0.197 - 20 * 2**20 / 400e6))
    compressed = judge(record(SLOW_LINK, SLOW_LINK, link=link, compress=True))
    assert [f.kind for f in compressed] == ["accumulation"]


def test_small_buckets_pay_the_latency_of_each() -> None:
    link = {"latency_s": 5e-3, "bytes_per_s": 2e9}
    found = judge(
        record(SLOW_LINK, SLOW_LINK, link=link, bucket_bytes=2**20, gradient_bytes=30 * 2**20)
    )
    assert [f.kind for f in found][:2] == ["buckets", "accumulation"]
    assert found[0].title.endswith("waits 100 ms for communication, in 30 buckets of 1 MiB")
    assert found[0].gain > 1.7


def test_other_layouts_get_no_advice_about_ddp() -> None:
    link = {"latency_s": 1e-3, "bytes_per_s": 400e6}
    for run in ({"strategy": ""}, {"mesh": "Mesh(tp=2)"}):
        assert judge(record(SLOW_LINK, SLOW_LINK, link=link, **run)) == []


def test_waits_that_the_link_does_not_explain_are_not_communication() -> None:
    assert judge(record(SLOW_LINK, SLOW_LINK)) == []  # it was not measured
    link = {"latency_s": 1e-4, "bytes_per_s": 8e9}
    assert judge(record(SLOW_LINK, SLOW_LINK, link=link)) == []


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("gradient_bytes", set()),
        ("bucket_bytes", {"communication", "accumulation"}),
        ("global_batch", {"communication"}),
        ("data_ranks", {"communication"}),
        ("micro_batch", {"communication"}),
        *[(name, {"communication", "accumulation"}) for name in ("cores", "workers", "step")],
    ],
)
def test_fields_that_an_older_version_did_not_write_are_unknown(name: str, kinds: set[str]) -> None:
    link = {"latency_s": 1e-3, "bytes_per_s": 400e6}
    made = record(SLOW_LINK, SLOW_LINK, link=link)
    del made.runs[0][name]
    assert {finding.kind for finding in judge(made)} == kinds


@pytest.mark.parametrize("name", ["latency_s", "bytes_per_s"])
def test_half_of_a_link_is_unknown(name: str) -> None:
    assert judge(record(SLOW_LINK, SLOW_LINK, link={name: 1e-3})) == []


def test_a_finding_is_one_sentence() -> None:
    finding = Finding(kind="data", title="input-bound", cure="Batches(..., workers=9)", gain=12.34)
    assert str(finding) == "input-bound: Batches(..., workers=9), expected 12x"


def test_a_cure_of_a_stall_leaves_some_of_it() -> None:
    left = {"checkpoint": 0.05, "evaluation": 0.05, "logging": 0.01}
    for phase, left_s in left.items():
        rank = HEALTHY | {phase: 0.1}
        (found,) = judge(record(rank, rank))
        assert found.kind == phase
        assert found.title == f"{phase} takes 50 % of the time"
        assert found.gain == pytest.approx(0.2 / (0.1 + left_s))


def test_ranks_that_all_wait_little_at_times_are_not_slow() -> None:
    waits_s = [{0: 0.0, 1: 10.0}, {0: 0.0, 1: 10.0}, {0: 20.0, 1: 30.0}, {0: 20.0, 1: 0.0}]
    assert find_late(waits_s, 60.0) == []
