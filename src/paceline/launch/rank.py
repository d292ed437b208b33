"""One rank as its launcher sees it: process, control socket, output, and what became of it.

A front to `subprocess.Popen`. The process is started before anything is known but its local rank, and
gets its orders over the socket later (see worker.py). It decides nothing: when to stop, and who is to
blame, is for crew.py and verdict.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.job.preemption import REQUEUE
from paceline.launch.output import Console, Consoles, Pump, Stream
from paceline.watch.probe import Probe

WORKER = Path(__file__).with_name("worker.py")

_ORDER_TIMEOUT_S = 30.0
_GROUP_GRACE_S = 1.0
_PROBE_BYTES = 1 << 20
# What each event has to have. A script may write into the socket what it likes.
_FAILED: dict[str, Any] = {"time": (int, float), "step": int, "kinds": list, "shown": bool}
_FAILED |= dict.fromkeys(("type", "message", "traceback", "module", "place"), str)
_EVENTS: dict[str, dict[str, Any]] = {
    "failed": _FAILED,
    "raised": _FAILED,
    "exit": {"place": str},
    "interrupted": {"place": str},
    **{answer: {"id": int} for answer in Probe.REQUESTS},
}
_MOST_BYTES = 8 << 20  # of one event
_WINDOW = struct.Struct("HHHH")
_NO_SIZE = bytes(_WINDOW.size)


class Rank:
    """A started process that will be, or is, a rank of the job.

    Args:
        environment: Everything that is known at the start; the rest comes with the orders.
        changed: Called in the pump's thread when the rank said something or ended.
        prefix: Before each line, until the rank's number in the job is known.
        draws: Whether it may have a terminal, where the launcher has one.
        wrap: Puts words before the command, such as numactl's.
    """

    def __init__(
        self,
        local_rank: int,
        *,
        environment: Mapping[str, str],
        consoles: Consoles,
        pump: Pump,
        changed: Callable[[], None],
        prefix: bytes,
        draws: bool,
        wrap: Callable[[tuple[str, ...]], tuple[str, ...]] = tuple,
    ) -> None:
        self.local_rank = local_rank
        self.rank = local_rank
        self.events: list[dict[str, Any]] = []
        self.told: dict[str, dict[str, Any]] = {}  # its latest answer to each kind of request
        self.returncode: int | None = None
        self.ended_at = 0.0
        # When we first signalled it: what happens to it afterwards is our doing.
        self.stopped_at: float | None = None
        self.frozen_at: float | None = None
        self.frozen_s = 0.0
        self.ordered = False
        self.hung = False
        self._pump = pump
        self._changed = changed
        self._received = b""
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_ORDER_TIMEOUT_S)
        # Its probe writes here (probe.py); in memory, so that it can be read whatever the rank does.
        self._probed = self._left = ""
        self._probe = os.memfd_create("paceline-probe")
        self.streams: list[Stream] = []
        self._terminals: list[tuple[Stream, Console]] = []
        self._prefix = prefix
        out, err = self._open_streams(consoles, draws)
        command = wrap((os.environ.get("PYTHON_EXEC", sys.executable), "-u", str(WORKER)))
        try:
            self.process = subprocess.Popen(
                command,
                stdin=None if local_rank == 0 else subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={
                    **environment,
                    "PACELINE_CONTROL_FD": str(theirs.fileno()),
                    "PACELINE_PROBE_FD": str(self._probe),
                },
                pass_fds=[theirs.fileno(), self._probe],
                start_new_session=True,
            )
        finally:
            theirs.close()
            for fd in {out, err}:
                os.close(fd)
        self.pid = self.process.pid
        for stream in self.streams:
            pump.add(stream)
        pump.watch(self._socket.fileno(), self.hear_all)
        self._watch_end()

    def _open_streams(self, consoles: Consoles, draws: bool) -> tuple[int, int]:
        """The rank's own ends of its outputs; ours become `self.streams`, output first."""
        if draws and consoles.out is consoles.err and consoles.out.is_terminal:
            fd = self._open_stream(consoles.out, terminal=True)
            return fd, fd  # one terminal, as in a shell, so that the order of the two is kept
        return (
            self._open_stream(consoles.out, terminal=draws and consoles.out.is_terminal),
            self._open_stream(consoles.err, terminal=draws and consoles.err.is_terminal),
        )

    def _open_stream(self, console: Console, *, terminal: bool) -> int:
        if terminal:
            ours, theirs = os.openpty()
            modes = termios.tcgetattr(theirs)
            modes[1] &= ~termios.OPOST  # the real terminal turns \n into \r\n, once
            termios.tcsetattr(theirs, termios.TCSANOW, modes)
        else:
            ours, theirs = os.pipe2(os.O_CLOEXEC)
        stream = Stream(ours, console, self._prefix, is_terminal=terminal)
        self.streams.append(stream)
        if terminal:
            self._terminals.append((stream, console))
            self.copy_window_size()
        return theirs

    def copy_window_size(self) -> None:
        """Give the rank's terminal the size of ours, less the prefix of each line."""
        for stream, console in self._terminals:
            if stream.ended:
                continue
            size = fcntl.ioctl(console.fd, termios.TIOCGWINSZ, _NO_SIZE)
            rows, columns, *pixels = _WINDOW.unpack(size)
            if columns:
                size = _WINDOW.pack(rows, max(1, columns - len(stream.prefix)), *pixels)
            if size != fcntl.ioctl(stream.fd, termios.TIOCGWINSZ, _NO_SIZE):
                fcntl.ioctl(stream.fd, termios.TIOCSWINSZ, size)

    def order(self, order: Mapping[str, Any]) -> None:
        """Send the rank its orders; one that is dead already is found by `returncode`."""
        self.ordered = True
        try:
            self._socket.sendall(json.dumps({"do": "run", **order}).encode() + b"\n")
        except OSError:
            self.poll()

    def ask(self, number: int, do: str = "explain", **more: Any) -> None:
        """Have the rank explain itself; the answer will have this number."""
        request = json.dumps({"do": do, "id": number, **more}).encode() + b"\n"
        with contextlib.suppress(OSError):  # dead already, or stopped for so long that it is full
            self._socket.sendall(request)

    @property
    def answer(self) -> dict[str, Any]:
        """Its latest to `explain`; empty before."""
        return self.told.get("explain", {})

    def probed(self) -> str:
        """What the rank's probe wrote: a line, then perhaps stacks."""
        if self._probe >= 0:
            self._probed = os.pread(self._probe, _PROBE_BYTES, 0).decode(errors="replace")
        return self._probed

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            code = self.process.poll()
            if code is not None:
                self.ended_at = time.time()
                self.returncode = code
        return self.returncode

    @property
    def failed(self) -> bool:
        """Whether it ended badly, or is about to."""
        # A rank that asks to be started again stands for all; else its peers fail, and it is judged.
        return self.returncode not in (None, 0, REQUEUE) or self.leaving

    @property
    def leaving(self) -> bool:
        """Whether it told of an error, and only flushes its files."""
        return any(event["event"] == "failed" for event in list(self.events))

    @property
    def gave_up(self) -> str:
        """What native code wrote when it aborted; empty where it did not."""
        if self.returncode != -signal.SIGABRT:
            return ""
        return self.streams[-1].tail.rpartition(b"terminate called")[2].decode(errors="replace")

    def watch_freeze(self, now: float) -> bool:
        """Note since when SIGSTOP holds it; whether it does. `now` is monotonic."""
        if self.returncode is None and _is_stopped(self.pid):
            self.frozen_at = self.frozen_at or now
        else:
            self.frozen_at = None
        return self.frozen_at is not None

    def end_frozen(self, after_s: float) -> None:
        """Kill it because SIGSTOP held it for `after_s` seconds; that is its failure."""
        self.frozen_s = after_s
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals, *, stops: bool = True) -> None:
        """Signal the rank's own process; its children are its own affair.

        Args:
            stops: Whether its end is our doing from now on.
        """
        if self.poll() is None:
            if stops:
                self.stopped_at = self.stopped_at or time.time()
            self.process.send_signal(number)

    def tell_end(self) -> None:
        """Have its training not take the next signal as a preemption."""
        self.stopped_at = self.stopped_at or time.time()
        with contextlib.suppress(OSError):  # dead already, or no Python of ours
            self._socket.sendall(b'{"do": "end"}\n')

    def kill(self) -> None:
        """Kill the rank and all that belongs to its process group."""
        self.send_signal(signal.SIGKILL)
        _signal_group(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let go of the socket of an ended rank."""
        self._pump.unwatch(self._socket.fileno(), self._socket.close)
        self.probed()  # for those who ask afterwards
        os.close(self._probe)
        self._probe = -1

    def hear_all(self) -> None:
        """Take in all that the rank has said; in the pump's thread only."""
        while self._hear():
            continue
        if self.returncode is not None and not self._left:
            self._left = (
                self.probed()
            )  # what it could not say where the script had closed our files
            self._take(self._left.encode().splitlines())

    def _hear(self) -> bool:
        """Take in some of what the rank said; False when there is nothing more."""
        fd = self._socket.fileno()
        if fd < 0:
            return False
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        if not data:
            self._pump.unwatch(fd, lambda: None)
            return False
        *lines, rest = (self._received + data).split(b"\n")
        self._received = rest if len(rest) <= _MOST_BYTES else b""
        self._take(lines)
        self._changed()
        return True

    def _take(self, lines: Sequence[bytes]) -> None:
        for event in filter(None, map(read_event, lines)):
            if event["event"] in Probe.REQUESTS:
                self.told[event["event"]] = event
            else:
                self.events.append(event)

    def _watch_end(self) -> None:
        # The time of death decides who was first, so it is not left to a poll.
        try:
            fd = os.pidfd_open(self.pid)
        except OSError:
            return  # an old kernel: the crew polls

        def ended() -> None:
            self._pump.unwatch(fd, lambda: os.close(fd))
            self.poll()
            self._changed()

        self._pump.watch(fd, ended)


def read_event(line: bytes) -> dict[str, Any] | None:
    """What worker.py sent; None for anything else, which a script may have written there."""
    try:
        event: dict[str, Any] = json.loads(line)
        well = all(isinstance(event[name], kind) for name, kind in _EVENTS[event["event"]].items())
        return event if well and all(isinstance(k, str) for k in event.get("kinds", ())) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped this process; one that a debugger holds is not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except OSError:
        return False


def clear_groups(groups: Sequence[int]) -> None:
    """End what ended ranks left behind: helpers that end by themselves have a moment."""
    # multiprocessing's resource tracker does not mind SIGTERM, and gives back shared memory first.
    left = [group for group in groups if _signal_group(group, signal.SIGTERM)]
    deadline = time.monotonic() + _GROUP_GRACE_S
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left = [group for group in left if _signal_group(group, 0)]
    for group in left:
        _signal_group(group, signal.SIGKILL)


def _signal_group(group: int, number: int) -> bool:
    """Signal a process group; False if it has no member."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False  # nobody is left, or only what has changed its user and is not ours any more
    return True
