"""The ranks of this host: started, watched, stopped, and cleaned up.

supervisor.py decides when each of these happens. This file does not import torch, because the ranks of one
host are started before the launcher imports it. It collects how ranks ended; `watch.crash` judges it.

Verbs: `stop` sends a signal, and SIGKILL after a grace period; `kill` sends SIGKILL and does not wait;
`clean_up` takes the last output of ended ranks and closes their files; `discard` kills, waits up to 10 s for
the end, and cleans up. `kill_suspended` kills single processes, and counts as their failure.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import LaunchFailed, count_of, name_ranks
from paceline.exit_codes import ExitCode
from paceline.job.preemption import COMMIT_S
from paceline.launch.output import Console, Consoles, LogFile, Pump, Stream
from paceline.machine import usable_cores
from paceline.watch.crash import Error, RankOutcome
from paceline.watch.probe import PROBE_NAME, STATE, UNSOLICITED_ID
from paceline.watch.processes import read_state
from paceline.watch.stacks import place_of_crash
from paceline.watch.wire import UNREADABLE, from_json

WORKER = Path(__file__).with_name("worker.py")
_GUARD = Path(__file__).with_name("guard.py")

_SEND_TIMEOUT_S = 30.0
# A rank that lost its peer may report before the rank that caused it; the cause reports within this time.
_REPORTS_S = 0.5
_KILLED_S = 10.0  # within which the kernel ends a process after SIGKILL, and a thread of ours ends
_GROUP_GRACE_S = 1.0  # for processes that ended ranks left behind
# How long the reader of our output may pause at the end of the job, and the same after a signal.
_STALLED_S = 30.0
_STALLED_SIGNAL_S = 2.0
_STATE_S = 1.0  # how long running ranks may take to report their state after a failure
_CONTROL_CLOSED_S = 1.0
_SUSPENDED_S = 1.0  # a debugger or a profiler may stop a rank for a moment
# Collectives that torch's flight recorder keeps in each rank. Those of the last seconds matter.
_RECORDED_COLLECTIVES = "256"
_PROBE_BYTES = 1 << 20
_EVENT_BYTES = 8 << 20  # longest event

_START_FIXES = {
    errno.EMFILE: "raise the limit of open files (`ulimit -n`), or start fewer ranks on this host.",
    errno.ENOENT: "check the program, or the interpreter in PYTHON_EXEC.",
    errno.EACCES: "check the program, or the interpreter in PYTHON_EXEC.",
    errno.ENOEXEC: "give the script a first line such as `#!/bin/bash`.",
}
_NO_SIZE = bytes(8)


@dataclass(frozen=True, kw_only=True)
class Event:
    """What worker.py reports about a rank.

    Attributes:
        event: "final_error": it ends by itself now; "seen_error": it may go on; "exit": the script called
            sys.exit(); "interrupted": by KeyboardInterrupt; "training": one that handles preemption signals;
            "saves_after_failure": one that saves its last step when another rank fails; "recovers": one that
            goes on with a process in place of a failed rank; "waits" for that process; "recovered".
        place: Where the script was.
        generation: Of the connections that it waits for, or has; see `paceline.job.recovery`.
    """

    event: str
    error: Error | None = None
    time: float = 0.0
    step: int = 0
    place: str = ""
    generation: int = 0


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """What a rank runs, and where its output goes.

    Args:
        rank: Of the job.
        environment: All variables of its process.
        is_python: Whether the command executes worker.py, which connects to the launcher.
        prefix: Put before each line, except on a terminal.
        terminal: Whether it gets a pseudo-terminal where the launcher has a terminal.
        shown: Whether the launcher shows its standard output, and its standard error.
        logs: Files for both; None for none.
    """

    local_rank: int
    rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    is_python: bool = True
    prefix: str = ""
    terminal: bool = False
    shown: tuple[bool, bool] = (True, True)
    logs: tuple[LogFile | None, LogFile | None] = (None, None)


class Rank:
    """One rank of this host: its process, control socket, output, and how it ended.

    Args:
        changed: Called in the pump's thread when the rank has sent an event or has ended.
    """

    def __init__(
        self,
        spec: RankSpec,
        *,
        consoles: Consoles,
        pump: Pump,
        changed: Callable[[], None],
    ) -> None:
        self.local_rank, self.rank = spec.local_rank, spec.rank
        self.events: list[Event] = []
        self.state: dict[str, Any] = {}  # what its probe has reported last
        self._is_asked = False  # for its state, without an answer yet
        self.returncode: int | None = None
        self.ended_at = 0.0
        self.told_to_end_at: float | None = None  # when the launcher first told it to end
        self.suspended_at: float | None = None  # monotonic, unlike the others
        self.suspended = False  # killed because SIGSTOP had stopped it
        self.lost_in = 0  # the step in which the others noticed its end; 0 if unknown
        self.hung = False
        self._closed_at = math.inf  # when its control socket was closed, monotonic
        self._pump = pump
        self._changed = changed
        self._received = b""
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_SEND_TIMEOUT_S)
        # Its probe (watch/probe.py) writes to this memory, so we can read it even if the rank is stuck.
        self._probe = os.memfd_create(PROBE_NAME)
        self._probe_text = ""
        self.streams: list[Stream] = []
        out, err = self._open_streams(spec, consoles)
        environment = dict(spec.environment)
        if spec.is_python:
            environment["PACELINE_CONTROL_FD"] = str(theirs.fileno())
            environment["PACELINE_PROBE_FD"] = str(self._probe) if has_probe() else ""
        try:
            self.process = subprocess.Popen(
                spec.command,
                stdin=None if spec.local_rank == 0 else subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                pass_fds=[theirs.fileno(), self._probe] if spec.is_python else [],
                start_new_session=True,
            )
        except OSError:
            for fd in (self._probe, *(stream.fd for stream in self.streams)):
                os.close(fd)
            raise
        finally:
            theirs.close()
            for fd in {out, err}:
                os.close(fd)
        self.pid = self.process.pid
        for stream in self.streams:
            pump.add(stream)
        pump.watch(self._socket.fileno(), self.read_events)
        self._watch_end()

    def _open_streams(self, spec: RankSpec, consoles: Consoles) -> tuple[int, int]:
        if spec.terminal and consoles.out is consoles.err and consoles.out.is_terminal:
            fd = self._open_stream(spec, 0, consoles.out)
            return fd, fd  # one terminal for both, as in a shell, keeps their order
        return self._open_stream(spec, 0, consoles.out), self._open_stream(spec, 1, consoles.err)

    def _open_stream(self, spec: RankSpec, number: int, console: Console) -> int:
        terminal = spec.terminal and console.is_terminal
        if terminal:
            ours, theirs = os.openpty()
            modes = termios.tcgetattr(theirs)
            modes[1] &= ~termios.OPOST  # only the real terminal must turn \n into \r\n
            termios.tcsetattr(theirs, termios.TCSANOW, modes)
        else:
            ours, theirs = os.pipe2(os.O_CLOEXEC)
        stream = Stream(
            ours,
            console if spec.shown[number] else None,
            b"" if terminal else spec.prefix.encode(),
            terminal=terminal,
        )
        if (log := spec.logs[number]) is not None:
            stream.files.append(log)
        self.streams.append(stream)
        self.copy_window_size()
        return theirs

    def copy_window_size(self) -> None:
        """Give the rank's terminal the size of ours."""
        for stream in self.streams:
            if stream.terminal and stream.console is not None and not stream.ended:
                with contextlib.suppress(OSError):  # our terminal was closed
                    size = fcntl.ioctl(stream.console.fd, termios.TIOCGWINSZ, _NO_SIZE)
                    if size != fcntl.ioctl(stream.fd, termios.TIOCGWINSZ, _NO_SIZE):
                        fcntl.ioctl(stream.fd, termios.TIOCSWINSZ, size)

    def send(self, request: Mapping[str, Any]) -> None:
        """Send a request to worker.py; an ended rank ignores it."""
        # An error means: it has ended, or it has been stopped for so long that the socket is full.
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(request).encode() + b"\n")

    def ask_state(self, number: int) -> None:
        """Ask the probe for the rank's state, unless an earlier question has no answer yet.

        Otherwise the socket of a rank that cannot answer would become full.
        """
        if not self._is_asked:
            self._is_asked = True
            self.send({"do": STATE, "id": number})

    def probe_text(self) -> str:
        """What the rank's probe wrote: one line of JSON, then stacks if the GIL was held."""
        if self._probe >= 0:
            self._probe_text = os.pread(self._probe, _PROBE_BYTES, 0).decode(errors="replace")
        return self._probe_text

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None and (code := self.process.poll()) is not None:
            self.ended_at = time.time()
            self.returncode = code
        return self.returncode

    @property
    def ended_badly(self) -> bool:
        """Whether it ended with a bad exit code, or is about to end because of an error.

        Also true of a rank that the launcher has ended; `outcome().failed` is the judgement.
        """
        # A preempted rank did not fail. Its peers may fail because they lost it; they are judged then.
        return self.returncode not in (None, 0, ExitCode.PREEMPTED) or self.reported_error

    @property
    def reported_error(self) -> bool:
        """Whether it has reported an error and will end by itself."""
        return any(event.event == "final_error" for event in list(self.events))

    def control_closed(self) -> bool:
        """Whether it runs without its control socket. The socket of a rank that ends closes just before."""
        return time.monotonic() - self._closed_at > _CONTROL_CLOSED_S

    def has_sent(self, name: str, *, generation: int = 0) -> Event | None:
        """The last event of this name, of a generation or a later one; None if there is none."""
        events = reversed(list(self.events))
        return next((e for e in events if e.event == name and e.generation >= generation), None)

    @property
    def trains(self) -> bool:
        """Whether it has begun a training, which saves and ends after a preemption signal."""
        return self.has_sent("training") is not None

    @property
    def is_starting(self) -> bool:
        """Whether it replaces another process, and has not begun its training."""
        return self.has_sent("recovered") is not None and not self.trains

    @property
    def saves_after_failure(self) -> bool:
        """Whether it saves the last step by itself, when a failure of another rank breaks its collectives."""
        return self.has_sent("saves_after_failure") is not None

    def begin(self, spec: RankSpec) -> None:
        """Let this process, which has imported torch and waits, become a rank."""
        self.local_rank, self.rank = spec.local_rank, spec.rank
        for stream, shown, log in zip(self.streams, spec.shown, spec.logs, strict=True):
            stream.prefix = spec.prefix.encode()
            stream.console = stream.console if shown else None
            stream.files += [] if log is None else [log]
        self.send({"do": "begin", "environment": dict(spec.environment)})

    def check_suspended(self, now: float) -> bool:
        """Whether it is stopped by SIGSTOP; also sets `suspended_at`. `now` is monotonic."""
        suspended = read_state(self.pid) == "T"
        self.suspended_at = (self.suspended_at or now) if suspended else None
        return suspended

    def send_signal(self, number: int, *, stops: bool = True) -> None:
        """Send a signal to the rank's own process, not to its children.

        Args:
            stops: Whether the rank's end no longer counts as a failure, because the launcher stopped it.
        """
        if self.poll() is None:
            if stops:
                self.told_to_end_at = self.told_to_end_at or time.time()
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the rank and its process group."""
        self.send_signal(signal.SIGKILL)
        _signal_group(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the sockets and files of an ended rank."""
        self._pump.unwatch(self._socket.fileno(), self._socket.close)
        self.probe_text()  # later calls return this text
        os.close(self._probe)
        self._probe = -1

    def read_events(self) -> None:
        """Read all events that the rank has sent; in the pump's thread only."""
        while self._read_some():
            continue

    def _read_some(self) -> bool:
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
            self._closed_at = time.monotonic()
            self._pump.unwatch(fd, lambda: None)
            return False
        *lines, rest = (self._received + data).split(b"\n")
        self._received = rest if len(rest) <= _EVENT_BYTES else b""
        self._add_events(lines)
        self._changed()
        return True

    def _add_events(self, lines: Sequence[bytes]) -> None:
        for event in map(read_event, lines):
            if isinstance(event, dict):
                self.state, self._is_asked = event, False
            elif event is not None:
                self.events.append(event)

    def _watch_end(self) -> None:
        # The time of its end decides which rank was first, and polling would be too late.
        try:
            fd = os.pidfd_open(self.pid)
        except OSError:
            return  # the kernel has no pidfd_open: `wait_change` polls

        def ended() -> None:
            self._pump.unwatch(fd, lambda: os.close(fd))
            self.poll()
            self._changed()

        self._pump.watch(fd, ended)

    def outcome(self) -> RankOutcome:
        """How it ended, as far as known."""
        error, exit_place, interrupted_at, at, step = None, None, "", self.ended_at, 0
        for event in list(self.events):
            if event.error is not None:
                if event.event == "final_error" or self.returncode != 0:
                    error, at, step = event.error, event.time, event.step
            elif event.event == "exit":
                exit_place = event.place
            elif event.event == "interrupted":
                interrupted_at = event.place
        # A rank that blocked the others may still tell of the peers that were stopped with it.
        if self.hung and (error is None or error.lost_peer):
            error = raised_error(self.state)
        abort, crashed_at = b"", ""
        if self.returncode is not None and self.returncode < 0:
            _, found, stacks = self.streams[-1].tail.rpartition(b"Fatal Python error: ")
            crashed_at = place_of_crash(stacks.decode(errors="replace")) if found else ""
            if self.returncode == -signal.SIGABRT:
                _, found, rest = self.streams[-1].tail.rpartition(b"terminate called")
                abort = rest if found else b""
        return RankOutcome(
            rank=self.rank,
            host=socket.gethostname(),
            pid=self.pid,
            time=at,
            returncode=self.returncode,
            error=error,
            exit_place=exit_place,
            interrupted_at=interrupted_at,
            crashed_at=crashed_at,
            hung=self.hung,
            suspended=self.suspended,
            step=step or self.lost_in,
            abort_message=abort.decode(errors="replace"),
            stopped=self.told_to_end_at is not None and (at == 0.0 or at > self.told_to_end_at),
        )


class Question:
    """A question for the states of ranks, and the answers of their probes."""

    _numbers = itertools.count()

    def __init__(self, ranks: Sequence[Rank], *, now: float, within_s: float) -> None:
        self._deadline = now + within_s
        self._ranks, self._number = ranks, next(self._numbers)
        for rank in ranks:
            rank.ask_state(self._number)

    @property
    def answers(self) -> dict[int, dict[str, Any]]:
        """The answers so far, by rank, without ranks that have ended since."""
        running = [rank for rank in self._ranks if rank.returncode is None]
        return {rank.rank: rank.state for rank in running if rank.state.get("id") == self._number}

    def is_open(self, now: float) -> bool:
        """Whether answers of ranks that have not ended are still awaited."""
        answers = self.answers
        awaited = [rank for rank in self._ranks if rank.returncode is None]
        return any(rank.rank not in answers for rank in awaited) and now < self._deadline


def read_event(line: bytes) -> Event | dict[str, Any] | None:
    """An event of worker.py, or a rank's state; None for anything else that a script may have written."""
    try:
        read: dict[str, Any] = json.loads(line)
        if read["event"] == STATE:
            return read if isinstance(read["id"], int) else None
        event: Event = from_json(Event, read)
        return event if event.error is not None or not event.event.endswith("_error") else None
    except UNREADABLE:
        return None


def raised_error(answer: Mapping[str, Any]) -> Error | None:
    """The error that the script of a rank handles, from a report of its state.

    Python shows an error only when all `finally` blocks have ended, and one may wait for other ranks.
    """
    try:
        error: Error = from_json(Error, answer["raised"]["error"])
        return error
    except UNREADABLE:
        return None


class LocalRanks:
    """The ranks of this host, before and after each restart.

    Attributes:
        ranks: Those of the current round.
        has_begun: Whether a round has begun.
        trained: Whether ranks of the latest round had begun a training, which saves and ends after a
            preemption signal; known when they have ended.
        has_signal: Returns whether the launcher has received a signal.
    """

    def __init__(self, consoles: Consoles) -> None:
        self.consoles = consoles
        self.pump = Pump()
        self.pump.on_turn = self._follow_window_size
        self.pump.on_error = lambda error: self.say(
            f"an error of Paceline itself, after which output may be missing: {error!r}"
        )
        self.ranks: list[Rank] = []
        self.has_begun = False
        self.trained = False
        self.has_signal: Callable[[], bool] = lambda: False
        self._standby: Rank | None = None
        self._changed = threading.Event()
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_GUARD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    def start(self, specs: Sequence[RankSpec]) -> None:
        """Start the ranks of a round.

        Raises:
            LaunchFailed: a process cannot be started; those before it are ended.
        """
        for spec in specs:
            try:
                rank = Rank(spec, consoles=self.consoles, pump=self.pump, changed=self._changed.set)
            except OSError as error:
                self.discard()
                raise LaunchFailed(
                    f"process {spec.local_rank + 1} of {len(specs)} cannot be started on this host.",
                    why=f"{error.strerror}{f': {error.filename}' if error.filename else ''}.",
                    fix=_START_FIXES.get(error.errno or 0, "start fewer ranks on this host."),
                ) from error
            self._tell_guard(f"+{rank.pid}\n")
            self.ranks.append(rank)

    def start_standby(self, spec: RankSpec) -> None:
        """Start a process that imports torch and paceline, and waits to replace a rank."""
        with contextlib.suppress(OSError):  # `replace` starts a process when it needs one
            self._standby = Rank(
                spec, consoles=self.consoles, pump=self.pump, changed=self._changed.set
            )
            self._tell_guard(f"+{self._standby.pid}\n")

    @property
    def has_standby(self) -> bool:
        """Whether a process waits to replace a rank."""
        return self._standby is not None

    def replace(self, failed: Rank, spec: RankSpec) -> Rank:
        """Put a new process in the place of a rank that has failed. `put_back` or `forget` follows.

        Raises:
            OSError: it cannot be started.
        """
        standby, self._standby = self._standby, None
        if standby is not None and standby.poll() is None:
            standby.begin(spec)
            new = standby
        else:
            new = Rank(spec, consoles=self.consoles, pump=self.pump, changed=self._changed.set)
            self._tell_guard(f"+{new.pid}\n")
        self.ranks[self.ranks.index(failed)] = new
        return new

    def put_back(self, failed: Sequence[Rank]) -> None:
        """End the processes in place of these ranks."""
        places = {rank.local_rank: rank for rank in failed}
        new = [r for r in self.ranks if r.local_rank in places and r not in failed]
        for rank in new:
            rank.kill()
        self._wait_done(new, _KILLED_S)
        self.forget(new)
        self.ranks = [places.get(rank.local_rank, rank) for rank in self.ranks]

    def forget(self, ended: Sequence[Rank]) -> None:
        """Pass on the last output of ended processes, and kill what they left behind."""
        stop_groups([rank.pid for rank in ended])
        for rank in ended:
            self._tell_guard(f"-{rank.pid}\n")
        self.pump.finish([s for rank in ended for s in rank.streams], stalled_s=self._stalled_s)
        self._read_all_events(ended)
        for rank in ended:
            rank.close()

    def end_standby(self) -> None:
        """End the process that waits to replace a rank."""
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.kill()
            self._wait_done([standby], _KILLED_S)
            self.forget([standby])

    def wait_change(self, timeout_s: float) -> None:
        """Wait until a rank has sent an event or has ended."""
        self._changed.wait(timeout_s)
        self._changed.clear()
        for rank in self.ranks:
            rank.poll()

    def kill_suspended(self) -> None:
        """Kill ranks that are stopped by SIGSTOP, because the others would wait for them forever.

        If every running rank is stopped, assume a deliberate suspension and do nothing.
        """
        now = time.monotonic()
        running = [rank for rank in self.ranks if rank.returncode is None]
        suspended = [rank for rank in running if rank.check_suspended(now)]
        for rank in suspended if len(suspended) < len(running) else ():
            if rank.suspended_at is not None and now - rank.suspended_at >= _SUSPENDED_S:
                rank.suspended = True  # this end counts as a failure of the rank
                rank.send_signal(signal.SIGKILL, stops=False)

    @property
    def any_ended_badly(self) -> bool:
        """Whether a rank ended badly."""
        return any(rank.ended_badly for rank in self.ranks)

    @property
    def done(self) -> bool:
        """Whether all ranks have ended."""
        return all(rank.returncode is not None for rank in self.ranks)

    @property
    def preempted(self) -> bool:
        """Whether a rank asked that the job be started again, and none ended in another way or still runs."""
        codes = {rank.returncode for rank in self.ranks}
        return ExitCode.PREEMPTED in codes and codes <= {ExitCode.OK, ExitCode.PREEMPTED}

    def forward_signal(self, number: int) -> None:
        """Signal the ranks."""
        for rank in self.ranks:
            if not rank.reported_error:
                rank.send_signal(number, stops=False)

    def disconnect(self, addresses: Sequence[str]) -> None:
        """Break the ranks' connections to lost hosts, so that their collectives fail, and they may save.

        The kernel tells a process nothing of a host that has lost its power or its network.
        """
        for rank in self.ranks:
            rank.send({"do": "disconnect", "addresses": list(addresses)})

    def give_up_recovery(self) -> None:
        """Let ranks that wait for a new process end with the error of their collective."""
        for rank in self.ranks:
            rank.send({"do": "give_up_recovery"})

    def stop(
        self, number: int, *, grace_s: float, skip_grace: Callable[[], bool], may_save: bool
    ) -> None:
        """End all ranks: send this signal, then SIGKILL after `grace_s` seconds.

        After a failure, ranks that may save their last step by themselves get no signal before SIGKILL.

        Args:
            skip_grace: Returns True if the ranks have to end at once.
            may_save: Whether a training may save a checkpoint before it ends.
        """
        self.give_up_recovery()
        killed = [r.rank for r in self.ranks if r.poll() is not None and not r.reported_error]
        for rank in self.ranks:
            if rank.reported_error:
                continue
            if not may_save:
                rank.told_to_end_at = rank.told_to_end_at or time.time()
                if rank.saves_after_failure and not rank.hung:
                    # Its next collective raises an error. A save that it waits for has none.
                    rank.send({"do": "peer_failed", "killed": killed})
                    continue
                rank.send({"do": "ignore_preemption"})
            rank.send_signal(number)
        self._wait_done(self.ranks, grace_s, skip_grace)
        if skip_grace():
            # They end by themselves at once; a training first commits a save that all ranks have written.
            for rank in [rank for rank in self.ranks if rank.poll() is None]:
                if rank.control_closed():  # it is no Python, or has closed all files
                    rank.kill()
                else:
                    rank.send({"do": "end"})
            self._wait_done(self.ranks, COMMIT_S)
        late = [rank for rank in self.ranks if rank.poll() is None]
        for rank in late:
            rank.kill()
        if not may_save:
            late = [rank for rank in late if rank.saves_after_failure]
        if late and not skip_grace():
            them = name_ranks(rank.rank for rank in late)
            self.say(
                f"{them} did not end within {grace_s:g} s, and got SIGKILL; see --shutdown-timeout"
            )
        self._wait_done(self.ranks, _KILLED_S)

    def wait_for_reports(
        self, enough: Callable[[Sequence[RankOutcome]], bool], *, skip_grace: Callable[[], bool]
    ) -> None:
        """Wait up to half a second for the reports of other failures, or until `enough(outcomes)`."""
        deadline = time.monotonic() + _REPORTS_S
        while time.monotonic() < deadline and not self.done and not enough(self.outcomes()):
            self.wait_change(0.02)
            if skip_grace():
                return

    def request_states(self) -> None:
        """Have running ranks report their stacks and collectives before they are ended."""
        for rank in self.ranks:
            if rank.state.get("id") != UNSOLICITED_ID:
                rank.state = {}  # it may be hours old
        running = [rank for rank in self.ranks if rank.poll() is None and not rank.reported_error]
        question = Question(running, now=time.monotonic(), within_s=_STATE_S)
        while question.is_open(time.monotonic()):
            time.sleep(0.01)

    def clean_up(self) -> list[Rank]:
        """Pass on the last output of ended ranks, and kill what they left behind; returns these ranks.

        `ranks` is empty afterwards.
        """
        ranks, self.ranks = self.ranks, []
        self.forget(ranks)
        self.trained = any(r.trains for r in ranks) and not any(r.is_starting for r in ranks)
        return ranks

    @property
    def _stalled_s(self) -> float:
        return _STALLED_SIGNAL_S if self.has_signal() else _STALLED_S

    def discard(self) -> None:
        """Kill the ranks, and clean up."""
        for rank in self.ranks:
            rank.kill()
        # A process that the kernel cannot end, as one that waits for a disk, is left to the kernel.
        self._wait_done(self.ranks, _KILLED_S)
        self.clean_up()

    def close(self) -> None:
        """Discard the ranks, and end the guard and the output thread."""
        self.end_standby()
        self.discard()
        self.pump.drain(stalled_s=self._stalled_s)
        self.pump.stop(timeout_s=_KILLED_S)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.send_signal(signal.SIGCONT)  # in case it was stopped
        self._guard.wait()

    def _tell_guard(self, line: str) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the guard was killed
            self._guard.stdin.write(line.encode())

    def outcomes(self, ranks: Sequence[Rank] | None = None) -> list[RankOutcome]:
        """How each of these ranks has ended so far; of all without an argument."""
        ranks = self.ranks if ranks is None else ranks
        self._read_all_events(ranks)
        return [rank.outcome() for rank in ranks]

    def say(self, text: str) -> None:
        """Write `paceline: <text>` to standard error, after complete lines; does not block."""
        self.show(f"paceline: {text}\n")

    def show(self, report: str) -> None:
        """Write a report of one or more lines as it is; otherwise as `say`."""
        self.pump.say(report, self.consoles.err)

    def _read_all_events(self, ranks: Sequence[Rank]) -> None:
        # The last event of a rank and its end may be seen in either order.
        def read() -> None:
            for rank in ranks:
                rank.read_events()

        self.pump.call(read, stalled_s=_KILLED_S)

    def _wait_done(
        self,
        ranks: Sequence[Rank],
        timeout_s: float,
        skip_grace: Callable[[], bool] = lambda: False,
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while None in [rank.poll() for rank in ranks]:
            if time.monotonic() > deadline or skip_grace():
                return
            self._changed.wait(min(0.1, timeout_s))
            self._changed.clear()

    def _follow_window_size(self) -> None:
        for rank in self.ranks[:1]:
            rank.copy_window_size()


def stop_groups(groups: Sequence[int]) -> None:
    """Stop the processes that ended ranks left behind. They have 1 s to end by themselves."""
    # multiprocessing's resource tracker ignores SIGTERM, and frees shared memory before it ends.
    left = [group for group in groups if _signal_group(group, signal.SIGTERM)]
    deadline = time.monotonic() + _GROUP_GRACE_S
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left = [group for group in left if _signal_group(group, 0)]
    for group in left:
        _signal_group(group, signal.SIGKILL)


def _signal_group(group: int, number: int) -> bool:
    """Signal a process group; False if it has no member that we may signal."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def has_probe() -> bool:
    """Whether ranks have a probe and a flight recorder; `PACELINE_PROBE=0` switches them off."""
    return os.environ.get("PACELINE_PROBE") != "0"


def choose_threads(nproc: int) -> tuple[str | None, str]:
    """Threads of each rank, None if the user chose them, and a sentence about them."""
    chosen = os.environ.get("OMP_NUM_THREADS")
    if chosen is not None:
        return None, f"{count_of(chosen, 'thread')} each (OMP_NUM_THREADS is set)"
    cores = usable_cores()
    threads = str(max(1, cores // nproc))
    why = f"{count_of(cores, 'usable core')} / {count_of(nproc, 'rank')}"
    return threads, f"{count_of(threads, 'thread')} each ({why})"


def environment_of_ranks(threads: str | None) -> dict[str, str]:
    """The environment that ranks are started with; `threads` is None if the user chose their number."""
    environment = dict(os.environ)
    environment["PACELINE_LAUNCHED"] = "1"
    if has_probe() and "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environment:
        environment.setdefault("TORCH_FR_BUFFER_SIZE", _RECORDED_COLLECTIVES)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = threads
    return environment
