"""Failure propagation: a rank that fails, or leaves a loop early, informs its peers through the store.

Collectives only report that a connection broke. A failing rank therefore writes a mark to the store before
it closes its connections, and its peers read the mark and name that rank. An exception that reaches the top
of the program ends the process at once: an interpreter that winds down would wait for peers, or abort in
torch's threads and hide the error.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist

from paceline import torch_private
from paceline.credentials import redact
from paceline.errors import PacelineError, PeerFailed, StepError, rank_location
from paceline.exit_codes import ExitCode
from paceline.job import current_step, store_exchange

# Keys of the store.
PREFIX = "peers"
_FAILED = "failed"
_ENDED = "ended"
_QUESTIONS = "questions"
_PASSED = "passed"
_NUM_COME = "come"
_ALL_HAVE_COME = "all"

_POLL_S = 0.005
_GRACE_S = 1.0  # before asking absent ranks, because most come within this time
_ANSWER_S = 0.25  # interval at which the thread writes this rank's step while a rank asks
_IDLE_S = 1.0  # interval at which the thread checks whether a rank asks
_LATE_S = 5.0  # limits how late another rank may be for the same `break`
_LINGER_S = 1.0  # limits how long rank 0 keeps its store for ranks that have not ended

_ENDED_A_JOB = "_paceline_ended_a_job"

NO_STEP_LEFT = sys.maxsize  # `Peers.passed` of a rank that leaves the job


class _Progress(NamedTuple):
    """How far a rank is, as its thread answers; see `Peers`. An answer may be out of date."""

    loop: int
    passed: int
    reduced: int
    waiting: str


class Peers:
    """Messages between the ranks of a job, apart from collectives.

    A rank that waits for others learns which of them cannot come any more, so no call waits forever. A
    thread answers other ranks that ask how far this rank is, while the main thread may be in a collective.

    Attributes:
        passed: the last step of this rank's loop that is not in progress any more; 0 before the first;
            `NO_STEP_LEFT` once this rank leaves the job.
        reduced: the last step in which this rank has begun a collective of the gradients.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.passed = self.reduced = 0
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._loop = 0
        self._place = ""  # where `_num_calls` were made
        self._num_calls = Counter[str]()
        self._posted: dict[str, str] = {}  # by call: the key of this rank in its newest exchange
        self._waiting = ""  # the name of the exchange in progress
        self._lingered = False
        self._stop = threading.Event()
        # The main thread may be in a blocking call of the store, which holds its client's lock.
        own_client: dist.Store = store.clone()  # type: ignore[attr-defined] # missing in torch's stubs
        self._thread = threading.Thread(
            target=self._answer, args=(own_client,), name="paceline-peers", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(timeout=5)

    def mark_failed(self, error: BaseException) -> None:
        """Record that `error` ends this rank, unless another rank failed first."""
        text = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
        mark = json.dumps({"rank": self._rank, "step": current_step.step, "text": redact(text)})
        try:
            self._store.compare_set(_FAILED, "", mark)
            self._store.set(f"{_ENDED}/{self._rank}", "")
        except RuntimeError:
            return  # rank 0 has ended, and the store with it

    def linger(self) -> None:
        """If the store ends with this process, wait a moment for ranks that may still read the mark."""
        hosted_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if self._rank != 0 or hosted_by_launcher or self._lingered:
            return
        self._lingered = True
        keys = [f"{_ENDED}/{rank}" for rank in range(self._world_size)]
        self._wait_for(keys, _LINGER_S)

    @staticmethod
    def has_failure(store: dist.Store) -> bool:
        """Whether a rank of the job has failed; for threads, which have their own client of the store."""
        return bool(store.check([f"{PREFIX}/{_FAILED}"]))

    def failure(self, *, wait_s: float = 0.0) -> PeerFailed | None:
        """The error to raise because another rank failed first; None if none is known."""
        if not self._wait_for([_FAILED], wait_s):
            return None
        mark = json.loads(self._store.get(_FAILED))
        if mark["rank"] == self._rank:
            return None
        return PeerFailed(
            f"rank {mark['rank']} failed first: {mark['text']}",
            where=rank_location(self._rank, self._world_size, step=current_step.step),
            why=f"rank {mark['rank']} ended in step {mark['step']}; this rank waited for it.",
            rank=mark["rank"],
        )

    def failure_behind_broken_collective(self) -> PeerFailed | None:
        """The peer's failure that broke a collective; None if no peer left a mark, as when it was killed."""
        try:
            # The mark is written before the connections close, so this wait is for a slow store.
            return self.failure(wait_s=0.1)
        except RuntimeError:
            return None  # rank 0 has ended, and the store with it

    def new_loop(self) -> int:
        """Count a new loop; its number. Each rank calls it when a loop begins, and when it is left early."""
        self.passed = self.reduced = (
            0  # before the number: the thread reads them in the opposite order
        )
        self._loop += 1
        return self._loop

    def end_step(self, step: int) -> None:
        """Tell the ranks that ask that this rank has passed a step."""
        goes_back = step <= self.passed  # another loop has run in the body of this step
        self.passed = step
        if goes_back:
            self._loop += 1  # so that no later step has the number and the loop of an earlier one

    def leave_loop(self, step: int, *, updated: bool) -> None:
        """Wait until all ranks have left the loop after the same step.

        Args:
            updated: whether this rank's update of the step was done; this rank then waits as long as another
                one works after its own `break`. If not, no other rank can finish its update, and this rank
                waits only as long as another may be late for the same `break`.

        Raises:
            StepError: another rank goes on, or left after another step.
        """
        loop, name = self._loop, f"left/{self.new_loop()}"
        wait_s = math.inf if updated else _LATE_S
        steps, missing = self.exchange(
            name, step, lambda other: other.loop >= loop and other.passed >= step, timeout_s=wait_s
        )
        others = {rank: f"left after step {s}" for rank, s in enumerate(steps) if s != step}
        for rank, passed in missing.items():
            others[rank] = f"went on after step {passed}" if passed >= step else "did not"
        if others:
            rank, what = next(iter(others.items()))
            raise StepError(
                f"rank {self._rank} left the training loop after step {step}, rank {rank} {what}.",
                where=rank_location(self._rank, self._world_size, step=step),
                why="only some ranks reach a `break`; the others would wait forever.",
                fix="call `step.stop()` instead: all ranks then stop after the same step.",
                step=step,
            )

    @property
    def is_in_step(self) -> bool:
        """Whether this rank is in a step of a training loop, or left its last loop early."""
        return self.passed < current_step.step

    def exchange_in_step(
        self, call: str, value: Any, *, timeout_s: float
    ) -> tuple[list[Any], dict[int, int]]:
        """As `exchange`, for a call that all ranks make in the same step, or after the same one.

        Ranks are missing that go on without the call: in a step to its sum of gradients or its end, else to
        a later loop or the end of the job; or that wait in another call.

        Args:
            call: which call it is, such as "evaluate". It is counted within the step only: after an error
                that some ranks have caught, the calls of the next step still belong together.
        """
        place = f"{self._loop}/{self.passed}/{current_step.step}"
        if place != self._place:
            self._place = place
            self._num_calls.clear()
        self._num_calls[call] += 1
        name = f"{call}/{place}/{self._num_calls[call]}"
        step = current_step.step if self.is_in_step else NO_STEP_LEFT
        loop, is_before_sum = self._loop, self.reduced < step

        def has_passed(other: _Progress) -> bool:
            reduces = is_before_sum and other.reduced >= step
            in_loop = other.loop == loop and (other.passed >= step or reduces)
            return in_loop or other.loop > loop or self._is_in_another_call(other.waiting)

        return self.exchange(name, value, has_passed, timeout_s=timeout_s)

    def _is_in_another_call(self, waiting: str) -> bool:
        """Whether an exchange belongs to this place, and this rank has not come to it."""
        call, _, rest = waiting.partition("/")
        place, _, number = rest.rpartition("/")
        return place == self._place and int(number) > self._num_calls[call]

    def exchange(
        self, name: str, value: Any, has_passed: Callable[[_Progress], bool], *, timeout_s: float
    ) -> tuple[list[Any], dict[int, int]]:
        """Give a value to all ranks and get theirs. If only some ranks call it, they learn who is missing.

        Takes four calls of the store if all ranks call it at about the same time, and a fifth one to delete
        what this rank gave before: the store keeps one value of each call and rank. The last rank to come
        writes a key that the others wait for, so the work of the store is linear in the number of ranks.

        Args:
            name: a name that is used once: the call, a slash, and what distinguishes it from earlier ones.
            value: anything that JSON can represent.
            has_passed: ranks for which it is True, and that have not given a value, are missing.

        Returns:
            The values in rank order, and {}; or [], and for each missing rank the last step that it passed.

        Raises:
            PeerFailed: a rank failed instead of giving a value.
        """
        self._waiting = name
        try:
            return self._exchange(name, value, has_passed, timeout_s)
        finally:
            self._waiting = ""

    def _exchange(
        self, name: str, value: Any, has_passed: Callable[[_Progress], bool], timeout_s: float
    ) -> tuple[list[Any], dict[int, int]]:
        keys = store_exchange.post(self._store, name, value, self._rank, self._world_size)
        call = name.partition("/")[0]
        previous, self._posted[call] = self._posted.get(call), keys[self._rank]
        deadline = time.monotonic() + timeout_s
        if self._store.add(f"{name}/{_NUM_COME}", 1) == self._world_size:
            self._store.set(f"{name}/{_ALL_HAVE_COME}", "")
        elif not self._wait_for([f"{name}/{_ALL_HAVE_COME}"], min(timeout_s, _GRACE_S)):
            missing = self._missing(keys, has_passed, deadline)
            if missing:
                return [], missing
        values = store_exchange.read(self._store, keys)
        if previous is not None:  # all ranks have come here, so they have read the exchange before
            self._store.delete_key(previous)
            if self._rank == 0:
                for key in (_NUM_COME, _ALL_HAVE_COME):
                    self._store.delete_key(f"{previous.rpartition('/')[0]}/{key}")
        return values, {}

    def _wait_for(self, keys: list[str], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self._store.check(keys):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _missing(
        self, keys: list[str], has_passed: Callable[[_Progress], bool], deadline: float
    ) -> dict[int, int]:
        """Ask the absent ranks for their step until all have come or some cannot come any more."""
        all_answered_at = deadline
        absent = list(range(self._world_size))
        self._store.add(_QUESTIONS, 1)
        try:
            while True:
                failure = self.failure()
                absent = [rank for rank in absent if not self._store.check([keys[rank]])]
                if failure is not None and absent:
                    raise failure
                progress = {rank: self._progress_of(rank) for rank in absent}
                late = time.monotonic() > deadline
                gone = {rank: p.passed for rank, p in progress.items() if late or has_passed(p)}
                # A rank gives its value before it passes, so it may have come in between.
                missing = {r: last for r, last in gone.items() if not self._store.check([keys[r]])}
                if missing:
                    # The other ranks' threads answer within this time.
                    all_answered_at = min(all_answered_at, time.monotonic() + _IDLE_S + _ANSWER_S)
                if len(missing) == len(absent) or time.monotonic() > all_answered_at:
                    return missing
                time.sleep(_ANSWER_S / 10)
        finally:
            self._store.add(_QUESTIONS, -1)

    def _progress_of(self, rank: int) -> _Progress:
        key = f"{_PASSED}/{rank}"
        if not self._store.check([key]):
            return _Progress(-1, 0, 0, "")
        return _Progress(*json.loads(self._store.get(key)))

    def _answer(self, store: dist.Store) -> None:
        wait_s = 0.0
        try:
            while not self._stop.wait(wait_s):
                asked = store.add(_QUESTIONS, 0) > 0
                wait_s = _ANSWER_S if asked else _IDLE_S
                if asked:
                    loop = self._loop
                    answer = _Progress(loop, self.passed, self.reduced, self._waiting)
                    store.set(f"{_PASSED}/{self._rank}", json.dumps(answer))
        except RuntimeError:
            return  # rank 0 has ended, and the store with it; the main thread reports it


def tell_launcher(error: BaseException) -> None:
    """Tell `paceline run`, if it started this process: it ends this rank soon after the first peer."""
    # The first code of such a rank runs under this name; it does not import paceline, nor this room it.
    report = getattr(sys.modules.get("paceline.launch.worker"), "report_before_clean_up", None)
    if report is not None and not isinstance(error, SystemExit | KeyboardInterrupt):
        report(error)


def abort_process_groups() -> None:
    """Close all process groups without waiting for peers; their collectives break at once."""
    abort = torch_private.find("torch.distributed.distributed_c10d._abort_process_group")
    (abort or dist.destroy_process_group)()


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class ExceptHook:
    """`sys.excepthook` of a job of several processes: inform the peers, show the error, end the process.

    After the job has failed, the hook acts only on the error that ended the job. For other errors of a
    program that caught that one, it only calls the previous hook.

    Attributes:
        peers: of the current job; None between jobs.
        previous: the hook before this one, which shows the error. It is torch's, with the rank in each line.
        before: the hook before the job, which is restored when the job is left.
    """

    def __init__(self, previous: Hook, before: Hook) -> None:
        self.peers: Peers | None = None
        self.previous = previous
        self.before = before

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if self.peers is None and not _ended_a_job(error):
            self.previous(kind, error, trace)
            return
        self.mark_failed(error)
        self.previous(kind, error, trace)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if dist.is_initialized():
            abort_process_groups()  # the collectives of the others break, and they read the mark
        if self.peers is not None:
            self.peers.linger()
        code = error.exit_code if isinstance(error, PacelineError) else ExitCode.FAILED
        os._exit(ExitCode.INTERRUPTED if issubclass(kind, KeyboardInterrupt) else code)

    def mark_failed(self, error: BaseException) -> None:
        """Inform the peers, if the job has not been left."""
        if self.peers is not None:
            self.peers.mark_failed(error)


_installed: ExceptHook | None = None


def install_excepthook(peers: Peers, before: Hook) -> None:
    """End the process when an exception reaches the top, except in an interactive interpreter.

    Args:
        before: `sys.excepthook` before `init_process_group`, which adds one at each call.
    """
    global _installed
    if hasattr(sys, "ps1") or _runs_in_a_notebook():
        return
    if _installed is None:
        _installed = ExceptHook(sys.excepthook, before)
        sys.excepthook = _installed
    _installed.peers = peers


def _runs_in_a_notebook() -> bool:
    kernel = sys.modules.get("ipykernel.kernelapp")  # also present where something only imported it
    return kernel is not None and bool(kernel.IPKernelApp.initialized())


def uninstall_excepthook() -> None:
    """Undo `install_excepthook`, unless the program has replaced the hook since."""
    global _installed
    if _installed is not None:
        _installed.peers = None
        if sys.excepthook is _installed:
            sys.excepthook = _installed.before
            _installed = None


def detach_excepthook(error: BaseException) -> None:
    """Release the job, which `error` ended. From now on the hook ends the process only for `error`."""
    if _installed is not None:
        _installed.peers = None
        error.__dict__[_ENDED_A_JOB] = True  # setattr fails for a frozen dataclass


def _ended_a_job(error: BaseException | None) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if hasattr(error, _ENDED_A_JOB):
            return True
        error = error.__cause__ or error.__context__
    return False
