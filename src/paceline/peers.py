"""What ranks tell each other when something goes wrong, through the store, apart from collectives.

A rank that fails leaves a mark before it closes its connections; the others, whose collectives break
because of that, read the mark and name it. Rank 0, with whose process the store may end, goes a moment
later. A rank that leaves the training loop waits here until all others have left it too, or one of them
is seen to go on; a thread on every rank answers that question while the main thread may be stuck in a
collective.
"""

from __future__ import annotations

import json
import os
import threading
import time

import torch.distributed as dist

from paceline.errors import PeerFailed, StepError, place

_FAILED = "failed"
_HEARD = "heard"
_LEFT = "left"
_AT = "at"
_POLL_S = 0.25
_LINGER_S = 1.0


class Peers:
    """The marks of one job.

    Attributes:
        step: the step this rank is in; kept by the training loop.
        passed: the last step after which this rank asked for another.

    Collective: none; every method may be called by one rank alone, unless it says otherwise.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.step = 0
        self.passed = 0
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._departures = 0  # from loops, in this job: each has its own keys
        self._lingered = False
        self._stop = threading.Event()
        # The main thread may sit in a blocking call of the store, which holds its client's lock.
        own_client: dist.Store = store.clone()  # type: ignore[attr-defined] # missing in torch's stubs
        self._thread = threading.Thread(
            target=self._answer, args=(own_client,), name="paceline-peers", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(timeout=5)

    def mark_failed(self, text: str) -> None:
        """Say that this rank failed, and with what, unless another was first."""
        mark = json.dumps({"rank": self._rank, "step": self.step, "text": text})
        self._store.compare_set(_FAILED, "", mark)
        self._store.set(f"{_HEARD}/{self._rank}", "")

    def linger(self) -> None:
        """Where the store ends with this process, wait a moment for those that have yet to read the mark."""
        hosted_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if self._rank != 0 or hosted_by_launcher or self._lingered:
            return
        self._lingered = True
        keys = [f"{_HEARD}/{rank}" for rank in range(self._world_size)]
        deadline = time.monotonic() + _LINGER_S
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.01)

    def failure(self, *, wait_s: float = 0.0) -> PeerFailed | None:
        """The error to raise because another rank failed first; None if none has."""
        deadline = time.monotonic() + wait_s
        while not self._store.check([_FAILED]):
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.02)
        mark = json.loads(self._store.get(_FAILED))
        if mark["rank"] == self._rank:
            return None
        return PeerFailed(
            f"rank {mark['rank']} failed first: {mark['text']}",
            where=place(self._rank, self._world_size, step=self.step),
            why=f"rank {mark['rank']} ended in step {mark['step']}; this rank waited for it.",
            rank=mark["rank"],
        )

    def explain(self, error: BaseException) -> PeerFailed | None:
        """What to raise instead of `error`, an error of a collective: the peer's failure behind it.

        None where no peer has said anything; a killed rank leaves no mark.
        """
        try:
            # A rank that fails leaves its mark before its connections close, so this is for a slow store.
            return self.failure(wait_s=0.1)
        except RuntimeError:
            return None  # the store is gone with rank 0: nothing more is known than `error` says

    def leave_loop(self, step: int, *, timeout_s: float) -> None:
        """Wait until all ranks have left the loop after the same step.

        Raises:
            StepError: another rank goes on, or left after another step.

        Collective: all ranks, when they leave the loop by `break`.
        """
        left, at = f"{_LEFT}/{self._departures}", f"{_AT}/{self._departures}"
        self._departures += 1
        self._store.set(f"{left}/{self._rank}", str(step))
        deadline = time.monotonic() + timeout_s
        for rank in range(self._world_size):
            while not self._store.check([f"{left}/{rank}"]):
                if self._store.check([f"{at}/{rank}"]):
                    passed = int(self._store.get(f"{at}/{rank}"))
                    if passed >= step:
                        raise self._left_alone(rank, step, f"went on after step {passed}")
                if time.monotonic() > deadline:
                    raise self._left_alone(rank, step, f"did not leave within {timeout_s:g} s")
                time.sleep(_POLL_S / 4)
            their = int(self._store.get(f"{left}/{rank}"))
            if their != step:
                raise self._left_alone(rank, step, f"left after step {their}")

    def _left_alone(self, rank: int, step: int, instead: str) -> StepError:
        return StepError(
            f"rank {self._rank} left the training loop after step {step}, rank {rank} {instead}.",
            where=place(self._rank, self._world_size, step=step),
            why="a `break` that only some ranks reach; the others would wait for ever.",
            fix="call `step.stop()` instead: all ranks then stop after the same step.",
            step=step,
        )

    def _answer(self, store: dist.Store) -> None:
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        try:
            while not self._stop.wait(_POLL_S):
                number = self._departures
                if any(store.check([f"{_LEFT}/{number}/{rank}"]) for rank in others):
                    store.set(f"{_AT}/{number}/{self._rank}", str(self.passed))
        except RuntimeError:
            return  # rank 0 and its store are gone; the main thread says what that means
