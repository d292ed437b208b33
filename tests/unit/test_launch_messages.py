"""The report of a failed job names memory as the cause if the kernel's counters show it."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.launch.messages import JobInfo, render_failure
from paceline.machine import Memory
from paceline.watch.crash import Error, RankOutcome, find_first_failure

BEFORE = Memory(kills=0, host_kills=5)
KILLED = Memory(kills=1, host_kills=6, limit_bytes=2 << 30, peak_bytes=2 << 30)
FULL = Memory(kills=0, host_kills=5, shm_bytes=64 << 20, shm_free_bytes=1 << 20)
LOADER = Error(
    type="RuntimeError",
    kinds=("builtins.RuntimeError",),
    message="DataLoader worker (pid 9) is killed by signal: Killed.",
    traceback="Traceback\n",
    module="torch.utils.data.dataloader",
    place="train.py:7 in main",
)


MISTAKE = dataclasses.replace(LOADER, type="ValueError", message="bad sample")
ELSEWHERE = Memory(kills=0, host_kills=6)


@pytest.mark.parametrize(
    ("number", "error", "after", "words"),
    [
        (9, None, KILLED, "killed it for memory: limit 2.0 GiB, peak 2.0 GiB (oom_kill 0 -> 1)."),
        (9, None, KILLED, "fix:   lower the micro-batch or the number of loader workers, or raise"),
        (9, None, BEFORE, "a process sent SIGKILL. It was not the kernel: its count of"),
        (9, None, Memory(host_kills=6), "memory: the host ran out (oom_kill 5 -> 6)."),
        (9, None, Memory(host_kills=5), "most often the kernel, because memory ran out."),
        (7, None, FULL, "/dev/shm has 64 MiB, 1 MiB free now."),
        (9, None, ELSEWHERE, "a process sent SIGKILL. It was not the kernel"),
        (0, LOADER, KILLED, "the kernel killed a process of this job for memory: limit 2.0 GiB"),
    ],
)
def test_memory_is_named_as_the_cause(
    number: int, error: Error | None, after: Memory, words: str
) -> None:
    code = -number or 1
    fact = RankOutcome(rank=1, host="h", pid=8, time=1.0, returncode=code, error=error)
    verdict = find_first_failure([fact])
    assert verdict is not None
    before = BEFORE if after.kills is not None else Memory(host_kills=5)
    shape = JobInfo(world_size=2, restarts=0, max_restarts=0, memory=(before, after))
    assert words in render_failure(verdict, shape)


@pytest.mark.parametrize("after", [KILLED, ELSEWHERE])
def test_an_error_of_the_script_is_not_explained_by_a_killed_process(after: Memory) -> None:
    verdict = find_first_failure(
        [RankOutcome(rank=0, host="h", pid=8, time=1.0, returncode=1, error=MISTAKE)]
    )
    assert verdict is not None
    info = JobInfo(world_size=1, restarts=0, max_restarts=0, memory=(BEFORE, after))
    assert "why:" not in render_failure(verdict, info)


def test_the_error_of_this_host_is_printed_beside_an_earlier_one_of_another_host() -> None:
    """The clocks of two hosts are not compared, so either may be the first."""
    there, here = (
        RankOutcome(rank=rank, host=host, pid=8, time=time, returncode=1, error=error)
        for rank, host, time, error in (
            (0, "a", 1.0, dataclasses.replace(MISTAKE, message="bad label")),
            (1, "b", 2.0, dataclasses.replace(MISTAKE, traceback="Traceback of rank 1\n")),
        )
    )
    first = find_first_failure([dataclasses.replace(there, elsewhere=True), here])
    assert first is not None
    text = render_failure(first, JobInfo(world_size=2, restarts=0, max_restarts=0))
    assert text.startswith(
        "[1] Traceback of rank 1\npaceline: rank 0 of 2 failed: ValueError: bad label"
    )
    assert "rank 1 failed too, perhaps earlier" in text
