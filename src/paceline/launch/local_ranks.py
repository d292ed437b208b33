"""The ranks of this host as a group: started early, ordered once, watched, stopped, and cleared away.

Stands below torch's agent (agent.py), and imports no torch: ranks are started before torch is there.
It gives facts about failures; it does not judge them.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.job.preemption import REQUEUE
from paceline.launch.output import Consoles, Pump
from paceline.launch.rank import WORKER, Rank, clear_groups
from paceline.watch import processes
from paceline.watch.crash import Error, Fact

_GUARD = Path(__file__).with_name("guard.py")

# A rank that lost its peer may be the first to say so. The cause then is on its way.
_SETTLE_S = 0.5
_KILLED_S = 10.0
# How long the reader of our output may pause at the end of the job, and after a signal.
_STALLED_S = 30.0
_STALLED_SIGNAL_S = 2.0

# Collectives that torch's flight recorder keeps in each rank; as many fit into a step.
_RECORDED = "256"
# How long ranks that still run may take to say where they are.
_ASKED_S = 0.3

# Their start would slow down that of the ranks.
_SPARES_AFTER_S = 3.0

# A debugger or a sampler may stop a rank for a moment.
_FROZEN_S = 1.0


class Guard:
    """Our hold on the process that clears away after a killed launcher (guard.py)."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_GUARD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    def add(self, group: int) -> None:
        """Have this process group killed if we die."""
        self._tell(f"+{group}\n")

    def own(self, folder: str) -> None:
        """Have this folder removed at our end, however it comes."""
        self._tell(f"={folder}\n")

    def remove(self, group: int) -> None:
        """Forget this process group."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """End the guard."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=_KILLED_S)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
        except BrokenPipeError:
            return  # somebody killed it; the ranks still die with us


class Crew:
    """The local ranks of one round, and then of the next."""

    def __init__(self, consoles: Consoles) -> None:
        self.consoles = consoles
        self.pump = Pump()
        self.pump.on_turn = self._follow_window_size
        self.ranks: list[Rank] = []
        self.announced = False
        self.signalled: Callable[[], bool] = lambda: False
        # Interpreters that have imported torch and wait to be the ranks after a restart.
        self._spares: list[Rank] = []
        self._begin: Callable[[str], list[Rank]] = lambda preload: []
        self._begun_at = 0.0
        self._guard = Guard()
        # Where checkpoints in memory live: longer than ranks, and no longer than the job.
        self._shadows = f"/dev/shm/paceline-{os.getpid()}-{uuid.uuid4().hex}"
        self._guard.own(self._shadows)
        self._changed = threading.Event()

    def start(
        self,
        count: int,
        environment: Mapping[str, str],
        *,
        draws: bool = True,
        wrap: Callable[[int, tuple[str, ...]], tuple[str, ...]] = lambda _, command: command,
    ) -> None:
        """Start `count` processes; they import torch and wait for `order`.

        With `draws`, local rank 0 has a terminal where we have one: a progress bar wants it, and only
        one rank may draw.
        """

        def begin(preload: str) -> list[Rank]:
            given = {"PACELINE_PRELOAD": preload, **environment, "PACELINE_SHADOW": self._shadows}
            ranks = []
            for local_rank in range(count):
                rank = Rank(
                    local_rank,
                    environment=given,
                    consoles=self.consoles,
                    pump=self.pump,
                    changed=self._changed.set,
                    prefix=f"[{local_rank}] ".encode() if count > 1 else b"",
                    draws=draws and local_rank == 0,
                    wrap=lambda command, n=local_rank: wrap(n, command),  # type: ignore[misc]
                )
                self._guard.add(rank.pid)
                ranks.append(rank)
            return ranks

        self._begin = begin
        if any(spare.poll() is not None for spare in self._spares):
            self._disband_spares()
        self.ranks, self._spares = self._spares or begin("torch"), []

    def keep_spares(self) -> None:
        """Once the ranks have been at work for a while, start those that would follow them."""
        if not self._spares and time.monotonic() - self._begun_at > _SPARES_AFTER_S:
            self._spares = self._begin("more")

    def _disband_spares(self) -> None:
        spares, self._spares = self._spares, []
        for rank in spares:
            rank.kill()
            rank.process.wait(_KILLED_S)
        self._clear(spares)

    def order(self, local_rank: int, rank: int, order: Mapping[str, Any]) -> None:
        """Tell a started process which rank it is, and what to run."""
        self.ranks[local_rank].rank = rank
        self.ranks[local_rank].order(order)
        self._begun_at = time.monotonic()

    def wait_change(self, timeout_s: float) -> None:
        """Wait until a rank said something or ended."""
        self._changed.wait(timeout_s)
        self._changed.clear()
        for rank in self.ranks:
            rank.poll()

    def end_frozen(self) -> None:
        """Kill ranks that SIGSTOP holds while others run, as those would wait for ever.

        Where all ranks are stopped somebody suspends the job.
        """
        now = time.monotonic()
        held = [rank for rank in self.ranks if rank.watch_freeze(now)]
        if len(held) < len(self.ranks):
            for rank in held:
                if rank.frozen_at is not None and now - rank.frozen_at >= _FROZEN_S:
                    rank.end_frozen(_FROZEN_S)

    @property
    def failing(self) -> bool:
        """Whether a rank has failed."""
        return any(rank.failed for rank in self.ranks)

    @property
    def done(self) -> bool:
        """Whether all ranks have ended."""
        return all(rank.returncode is not None for rank in self.ranks)

    @property
    def preempted(self) -> bool:
        """Whether a rank asked that the job be started again."""
        return any(rank.returncode == REQUEUE for rank in self.ranks)

    def pass_on(self, number: signal.Signals) -> None:
        """Signal the ranks whose scripts have begun."""
        for rank in self.ranks:
            if rank.ordered and not rank.leaving:
                rank.send_signal(number, stops=False)

    def wake(self) -> None:
        """Have `wait_change` return; from any thread."""
        self._changed.set()

    def stop(
        self,
        number: signal.Signals,
        *,
        grace_s: float,
        hurry: Callable[[], bool],
        at_once: bool = False,
    ) -> None:
        """End all ranks: by this signal, and by SIGKILL after the grace or when `hurry()` says so.

        Args:
            at_once: There is nothing to wait for: a training shall not save first.
        """
        for rank in self.ranks:
            if not rank.ordered:
                rank.kill()  # its script has not begun; there is nothing to save
            elif not rank.leaving:
                if at_once:
                    rank.tell_end()
                rank.send_signal(number)
        self._wait_done(grace_s, hurry)
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
        self._wait_done(_KILLED_S, lambda: False)

    def settle(self, judge: Callable[[Sequence[Fact]], bool], *, hurry: Callable[[], bool]) -> None:
        """Give failures a moment to come in, until `judge` has seen enough."""
        deadline = time.monotonic() + _SETTLE_S
        while time.monotonic() < deadline and not self.done and not judge(self.facts()):
            self.wait_change(0.02)
            if hurry():
                return

    def ask(self) -> None:
        """Have the ranks that still run tell where they are, before they are ended."""
        alive = [rank for rank in self.ranks if rank.poll() is None and not rank.leaving]
        for rank in alive:
            rank.ask(-1)
        deadline = time.monotonic() + _ASKED_S
        while time.monotonic() < deadline and any(r.answer.get("id") != -1 for r in alive):
            time.sleep(0.01)

    def clear(self) -> None:
        """After all ranks have ended: pass on their last output, and end what they left behind."""
        self._clear(self.ranks)

    def _clear(self, ranks: Sequence[Rank]) -> None:
        clear_groups([rank.pid for rank in ranks])
        for rank in ranks:
            self._guard.remove(rank.pid)
        self.pump.finish([s for rank in ranks for s in rank.streams], stalled_s=self._stalled_s)
        self._hear_all()
        for rank in ranks:
            rank.close()

    @property
    def _stalled_s(self) -> float:
        """How long output may stand still at the end of the ranks."""
        return _STALLED_SIGNAL_S if self.signalled() else _STALLED_S

    def dismiss(self) -> None:
        """Forget the cleared ranks."""
        self.ranks = []

    def kill(self) -> None:
        """Kill the ranks, and do not wait."""
        for rank in self.ranks:
            rank.kill()

    def disband(self) -> None:
        """End the ranks, whatever they do."""
        self.kill()
        self._wait_done(_KILLED_S, lambda: False)
        self.clear()
        self.dismiss()

    def close(self) -> None:
        """Kill what runs, and end the helpers."""
        self.disband()
        self._disband_spares()
        self.pump.drain(stalled_s=self._stalled_s)
        self.pump.stop(timeout_s=_KILLED_S)
        self._guard.close()

    def facts(self) -> list[Fact]:
        """What became of each rank so far."""
        self._hear_all()
        return [_fact(rank) for rank in self.ranks]

    def say_daemons(self) -> None:
        """Name what cleared ranks have forked into sessions of their own."""
        known = [rank.pid for rank in [*self.ranks, *self._spares]]
        pids = [str(p) for p in processes.forks(self._shadows, str(WORKER)) if p not in known]
        if pids:
            self.say(
                f"paceline: daemons of a script go on unseen, pid {', '.join(pids)}: forbid them\n"
            )

    def interrupted_at(self) -> str:
        """Where the first rank was that a KeyboardInterrupt ended; empty if there is none."""
        places = [
            f"rank {rank.rank} was at {event['place']}"
            for rank in self.ranks
            for event in rank.events
            if event["event"] == "interrupted" and event["place"]
        ]
        return places[0] if places else ""

    def say(self, text: str) -> None:
        """Write our own words to standard error, after whole lines."""
        self.pump.say(text, self.consoles.err)

    def _hear_all(self) -> None:
        # A rank's last words and its end may be seen in either order.
        ranks = list(self.ranks)

        def hear() -> None:
            for rank in ranks:
                rank.hear_all()

        self.pump.call(hear, stalled_s=_KILLED_S)

    def _wait_done(self, timeout_s: float, hurry: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.done and time.monotonic() < deadline and not hurry():
            self.wait_change(min(0.1, timeout_s))

    def _follow_window_size(self) -> None:
        for rank in self.ranks[:1]:
            rank.copy_window_size()


def _fact(rank: Rank) -> Fact:
    error, exit_place, at, step = None, None, rank.ended_at, 0
    for event in list(rank.events):
        if event["event"] in ("raised", "failed"):
            at, step = event["time"], event["step"]
            told = {field.name: event[field.name] for field in dataclasses.fields(Error)}
            error = Error(**told | {"kinds": tuple(event["kinds"])})
        elif event["event"] == "exit":
            exit_place = event["place"]
    return Fact(
        rank=rank.rank,
        host=socket.gethostname(),
        pid=rank.pid,
        time=at,
        returncode=rank.returncode,
        error=error,
        exit_place=exit_place,
        hung=rank.hung,
        frozen_s=rank.frozen_s,
        step=step,
        gave_up=rank.gave_up,
        stopped=rank.stopped_at is not None and (at == 0.0 or at > rank.stopped_at),
    )


def probing() -> bool:
    """Whether ranks have a probe and a flight recorder, which `PACELINE_PROBE=0` takes from them."""
    return os.environ.get("PACELINE_PROBE") != "0"


def environment_of_ranks(threads: str | None) -> dict[str, str]:
    """The environment that ranks are started with; `threads` is None where the user chose."""
    environment = dict(os.environ)
    environment.pop("PACELINE_THREADS", None)
    environment["PACELINE_LAUNCHED"] = "1"
    if probing() and "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environment:
        environment.setdefault("TORCH_FR_BUFFER_SIZE", _RECORDED)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = threads
        environment["PACELINE_THREADS"] = "auto"
    return environment
