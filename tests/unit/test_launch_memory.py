"""What the kernel counted, and what a failed job may leave of its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.launch.bundle import settings
from paceline.launch.messages import JobInfo, render_failure
from paceline.machine import Memory, read_memory
from paceline.watch.crash import Error, RankOutcome, find_first_failure


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_counters_of_version_1(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("5:cpu,cpuacct:/a\n4:memory:/job/step\n0::/\n")
    group = tmp_path / "memory" / "job" / "step"
    write(group, memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    write(group, memory__limit_in_bytes="9223372036854771712\n")
    write(group, memory__max_usage_in_bytes="1073741824\n")
    write(group.parent, memory__limit_in_bytes="2147483648\n", memory__oom_control="oom_kill 9\n")
    found = read_memory(tmp_path / "cgroup", tmp_path)
    assert (found.kills, found.limit_bytes, found.peak_bytes) == (3, 2 << 30, 1 << 30)


def test_counters_of_version_2(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/job\n")
    write(tmp_path / "job", memory__events="low 0\noom 4\noom_kill 2\n", memory__max="max\n")
    write(tmp_path / "job", memory__peak="524288000\n")
    found = read_memory(tmp_path / "cgroup", tmp_path)
    assert (found.kills, found.limit_bytes, found.peak_bytes) == (2, None, 524288000)


def test_a_machine_without_counters(tmp_path: Path) -> None:
    assert read_memory(tmp_path / "none", tmp_path).kills is None


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


@pytest.mark.parametrize(
    ("number", "error", "after", "words"),
    [
        (9, None, KILLED, "killed it for memory: limit 2.0 GiB, peak 2.0 GiB (oom_kill 0 -> 1)."),
        (
            9,
            None,
            KILLED,
            "fix:   lower the micro-batch or the number of loader workers, or raise the limit.",
        ),
        (9, None, BEFORE, "by its counter, the kernel did not kill it for memory."),
        (9, None, Memory(host_kills=6), "memory: the host ran out (oom_kill 5 -> 6)."),
        (9, None, Memory(host_kills=5), "most often the kernel, because memory ran out."),
        (7, None, FULL, "/dev/shm has 64 MiB, 1 MiB free now."),
        (0, LOADER, KILLED, "the kernel killed a process of this job for memory: limit 2.0 GiB"),
    ],
)
def test_words_for_memory(number: int, error: Error | None, after: Memory, words: str) -> None:
    code = -number or 1
    fact = RankOutcome(rank=1, host="h", pid=8, time=1.0, returncode=code, error=error)
    verdict = find_first_failure([fact])
    assert verdict is not None
    before = BEFORE if after.kills is not None else Memory(host_kills=5)
    shape = JobInfo(world_size=2, restarts=0, max_restarts=0, memory=(before, after))
    assert words in render_failure(verdict, shape)


def test_no_secret_is_kept() -> None:
    given = {
        "RANK": "1",
        "NCCL_DEBUG": "INFO",
        "TORCH_AUTH_TOKEN": "t",
        "SLURM_API_KEY": "k",
        "HOME": "/home/me",
        "AWS_SECRET_ACCESS_KEY": "s",
    }
    assert settings(given) == {"NCCL_DEBUG": "INFO", "RANK": "1"}
