"""What the kernel says of a process: /proc, for the launcher's own ranks and their children.

Facts alone; what they mean is for hang.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.machine import cgroup_folders, read_text

_TICKS = os.sysconf("SC_CLK_TCK")
_EXITING = 0x4  # PF_EXITING of the kernel, in a thread's flags
_PROBED = "/memfd:paceline-probe"


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process at one moment.

    Args:
        state: As /proc has it: R runs, S sleeps, D waits for a device, T is stopped, Z is dead.
        cpu_s: Seconds of CPU so far, of all its threads.
        io_bytes: Read and written so far, files and pipes together.
        faults: Pages that had to come from a disk so far.
        core: The core that it last ran on.
    """

    pid: int
    name: str
    state: str
    cpu_s: float
    io_bytes: int
    faults: int
    core: int


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What the host is at, at one moment.

    Args:
        processes: All that can be seen, by number.
        ranks: Of the job, with all processes below, by the number of the rank's own.
        delay_s: For how long each rank's main thread has waited for a core so far.
        throttled_s: For how long the limit of a control group has held them up so far.
        mhz: Of the core that each rank last ran on, where it can be read.
    """

    time_s: float
    processes: Mapping[int, Process]
    ranks: Mapping[int, Sequence[int]]
    delay_s: Mapping[int, float]
    throttled_s: float
    mhz: Mapping[int, float]


def moment(pids: Sequence[int]) -> Moment:
    """The host now, and these ranks on it."""
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    found = {pid: seen for pid in numbers if (seen := look(pid)) is not None}
    delay_s, mhz = {}, {}
    for pid in pids:
        waited_ns = read_text(Path(f"/proc/{pid}/schedstat")).split()[1:2]
        delay_s[pid] = int(waited_ns[0]) / 1e9 if waited_ns else 0.0
        if pid in found:
            folder = Path(f"/sys/devices/system/cpu/cpu{found[pid].core}/cpufreq")
            if text := read_text(folder / "scaling_cur_freq").strip():
                mhz[pid] = int(text) / 1e3
    return Moment(
        time_s=time.monotonic(),
        processes=found,
        ranks={pid: descendants(pid) for pid in pids},
        delay_s=delay_s,
        throttled_s=_throttled_s(),
        mhz=mhz,
    )


def _throttled_s() -> float:
    units = {"throttled_usec": 1e6, "throttled_time": 1e9}  # cgroup 2, and 1
    lines = [
        line.split()
        for folder in cgroup_folders("cpu")
        for line in read_text(folder / "cpu.stat").splitlines()
    ]
    return max((int(n) / units[name] for name, n in lines if name in units), default=0.0)


def look(pid: int) -> Process | None:
    """The process now; None if there is none."""
    try:
        head, _, tail = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return None
    fields = tail.split()
    io_bytes = 0
    with contextlib.suppress(OSError):  # of another user since
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        io_bytes = sum(int(line.split()[1]) for line in lines[:2])
    return Process(
        pid=pid,
        name=head.partition("(")[2],
        state=fields[0],
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS,
        io_bytes=io_bytes,
        faults=int(fields[9]),
        core=int(fields[36]),
    )


def children(pid: int) -> list[int]:
    """The processes that this one has started and that have not been waited for."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """All processes below this one."""
    found = children(pid)
    for child in found:
        found += children(child)
    return found


def forks(mark: str, command: str) -> list[int]:
    """Processes that run `command` and were started with `mark` in their environment, by /proc."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if (
                command.encode() in Path(f"/proc/{entry}/cmdline").read_bytes()
                and mark.encode() in Path(f"/proc/{entry}/environ").read_bytes()
            ):
                found.append(int(entry))
    return sorted(found)


def is_ending(pid: int) -> bool:
    """Whether a process of which the main thread has ended has no thread that could go on.

    The kernel is at it, which takes a while on a busy host, or nobody has waited for it yet. A thread that
    outlives the main one is neither at its end nor killed.
    """
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # gone meanwhile
                folder = Path(f"/proc/{pid}/task/{task}")
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if fields[0] in "ZX" or int(fields[6]) & _EXITING:
                    continue
                pending = (folder / "status").read_text().partition("SigPnd:")[2].split()[0]
                if not int(pending, 16) >> signal.SIGKILL - 1 & 1:
                    return False
    return True


def waits_in(pid: int) -> str:
    """The kernel's function that the process waits in; empty if unknown."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    return ""


def probed(pid: int) -> str:
    """What the probe of a rank's forked child wrote (probe.py); empty if it has none."""
    with contextlib.suppress(OSError):
        for fd in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(fd.path).startswith(_PROBED):
                    return Path(fd.path).read_text(errors="replace")
    return ""
