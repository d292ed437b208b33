"""The clock of a step: phases add up, waits inside of others, a device's events, and the file of a run."""

from __future__ import annotations

import json
import threading

import pytest

from paceline.clock import record, step_clock
from paceline.clock.step_clock import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    EVALUATION,
    FORWARD,
    OTHER,
    PHASES,
    DeviceTimes,
    StepClock,
    Times,
)


class FakeTime:
    """`time`, whose clocks move by `advance` only."""

    def __init__(self) -> None:
        self.now = 10**9

    def perf_counter_ns(self) -> int:
        return self.now


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(step_clock, "time", fake)
    return fake


def _pass(fake: FakeTime, ms: float) -> None:
    fake.now += int(ms * 1e6)


def test_phases_add_up_and_the_second_step_tells_the_wait(fake: FakeTime) -> None:
    clock = StepClock()
    clock.start()
    with clock.during(COMMUNICATION):  # the exchange of the times before
        _pass(fake, 32)
    for step in range(3):
        clock.enter(DATA)
        _pass(fake, 1)
        clock.enter(FORWARD)
        _pass(fake, 2)
        clock.enter(BACKWARD)
        _pass(fake, 4)
        was = clock.begin(COMMUNICATION)
        _pass(fake, 8 + step)
        clock.end(was)
        _pass(fake, 16)
        clock.enter(OTHER)
        clock.end_step()
    times = clock.take()
    assert times.steps == 3
    found = dict(zip(PHASES, times.spent_s, strict=True))
    assert {name: s for name, s in found.items() if s} == pytest.approx(
        {
            "data": 0.003,
            "forward": 0.006,
            "backward": 0.060,
            "communication": 0.059,
        }
    )
    assert times.wait_s == pytest.approx(0.009)
    assert clock.take() == Times(steps=0, spent_s=[0.0] * len(PHASES))
    clock.enter(COMMUNICATION)
    _pass(fake, 2)
    clock.enter(FORWARD)
    clock.end_step()
    _pass(fake, 4)
    times = clock.take()
    assert times.wait_s == pytest.approx(0.002)  # of the only whole step
    assert sum(times.spent_s) == pytest.approx(0.006)


def test_waits_of_other_threads_and_inside_an_evaluation_do_not_count(fake: FakeTime) -> None:
    clock = StepClock()
    assert clock.begin(COMMUNICATION) == -1  # not started
    clock.start()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(clock.begin(COMMUNICATION)))
    thread.start()
    thread.join()
    assert found == [-1]
    with clock.during(EVALUATION):
        assert clock.begin(COMMUNICATION) == -1
        _pass(fake, 5)
    assert clock.phase == OTHER
    clock.stop()
    assert clock.begin(COMMUNICATION) == -1
    assert clock.take().spent_s[EVALUATION] == pytest.approx(0.005)


class FakeEvent:
    """An event of a device that finishes its work later than the host issues it."""

    now_ms = 0.0
    done_ms = 0.0

    def record(self) -> None:
        self.at_ms = FakeEvent.now_ms

    def query(self) -> bool:
        return self.at_ms <= FakeEvent.done_ms

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.at_ms - self.at_ms


def test_a_device_counts_the_steps_that_it_has_finished() -> None:
    FakeEvent.now_ms = FakeEvent.done_ms = 0.0
    times = DeviceTimes(FakeEvent)
    for _ in range(2):
        times.mark(-1)
        FakeEvent.now_ms += 3
        times.mark(FORWARD)
        FakeEvent.now_ms += 5
        times.mark(BACKWARD)
        times.end_step()
        FakeEvent.now_ms += 100  # a step that is not sampled
    for done_ms in (8.0, 116.0):  # before, the device is in the backward of the second step
        FakeEvent.done_ms = done_ms
        spent_ns = times.take()
        assert (spent_ns[FORWARD], spent_ns[BACKWARD]) == (3e6, 5e6)
        assert times.take() == spent_ns  # no further step has finished


def test_the_time_of_all_steps_is_divided_as_that_of_the_sampled_ones(fake: FakeTime) -> None:
    """An evaluation is seldom in a sampled step, so it keeps the time of the host."""
    FakeEvent.now_ms = FakeEvent.done_ms = 0.0
    events = []
    clock = StepClock()

    def new_event() -> FakeEvent:
        events.append(clock._steps)
        return FakeEvent()

    clock.start(new_event)
    for step in range(350):
        clock.enter(FORWARD)
        FakeEvent.now_ms += 3
        clock.enter(OTHER)
        FakeEvent.now_ms += 1
        _pass(fake, 2)
        if step == 7:
            with clock.during(EVALUATION):
                _pass(fake, 100)
                FakeEvent.now_ms += 100
        clock.end_step()
    assert set(events) == {0, 1, 100, 200, 300}
    FakeEvent.done_ms = FakeEvent.now_ms
    times = clock.take()
    assert times.steps == 350
    assert times.spent_s[EVALUATION] == pytest.approx(0.1)
    assert times.spent_s[FORWARD] == pytest.approx(0.7 * 3 / 4)
    assert sum(times.spent_s) == pytest.approx(0.8)
    # No sampled step has finished since: the shares are those of the last ones.
    FakeEvent.done_ms = 0.0
    clock.enter(OTHER)
    _pass(fake, 4)
    clock.end_step()
    assert clock.take().spent_s[FORWARD] == pytest.approx(0.003)


def test_a_device_whose_times_nobody_reads_keeps_few_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_clock, "_MAX_EVENTS", 20)
    FakeEvent.now_ms, FakeEvent.done_ms = 0.0, 1e9
    times = DeviceTimes(FakeEvent)
    for _ in range(100):
        times.mark(-1)
        for phase in (FORWARD, BACKWARD):
            times.mark(phase)
        times.end_step()
    assert len(times._pending) <= 20


def _rows(fake: FakeTime, ranks: int) -> list[list[float]]:
    rows = []
    for rank in range(ranks):
        clock = StepClock()
        clock.start()
        clock.enter(DATA)
        _pass(fake, 10 * (rank + 1))
        clock.enter(OTHER)
        clock.end_step()
        rows.append(record.pack_row(clock.take(), 1000.0 + rank, 0.5))
    return rows


@pytest.mark.parametrize("ranks", [1, 2, 3, 9])
def test_a_window_is_read_as_it_was_written(fake: FakeTime, ranks: int) -> None:
    rows = _rows(fake, ranks)
    assert {len(row) for row in rows} == {record.ROW_SIZE}
    written = record.Window.from_rows(7, rows, time=5.0, samples=64)
    run = {"step": 0, "run": {"time": 1.0, "world_size": ranks}}
    whole = json.dumps({"step": 7, **written.to_line()})
    text = f"{json.dumps(run)}\n{whole}\nnot a line\n[1]\n{whole[: len(whole) // 2]}"
    found = record.read_lines(text.encode().splitlines())
    assert found.skipped == 3
    assert found.run == {"time": 1.0, "world_size": ranks, "step": 0}
    (window,) = found.windows
    assert window == written
    assert (window.step, window.steps, window.samples, window.num_ranks) == (7, 1, 64, ranks)
    assert window.wall_s == pytest.approx([0.01 * (rank + 1) for rank in range(ranks)])
    assert window.per_step("data", ranks - 1) == pytest.approx(0.01 * ranks)
    assert window.memory_bytes == [1000.0 + rank for rank in range(ranks)]


def test_the_wait_of_the_rank_that_came_last_is_the_communication() -> None:
    rows = [
        record.pack_row(Times(steps=4, spent_s=[0.1] * len(PHASES), wait_s=wait_s), 0.0, 0.5)
        for wait_s in (0.03, 0.01, 0.02)
    ]
    assert record.Window.from_rows(4, rows, time=5.0, samples=64).exposed_s == 0.01
