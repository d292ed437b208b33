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
from paceline.job import current_step

_FAILED = "failed"
_HEARD = "heard"
_ASKED = "asked"
_AT = "at"
_POLL_S = 0.25
_LATE_S = 5.0  # by which ranks may come to the same place one after the other
_LINGER_S = 1.0


class Peers:
    """The marks of one job.

    Attributes:
        passed: the last step after which this rank asked for another.

    Collective: none; every method may be called by one rank alone, unless it says otherwise.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.passed = 0
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._scopes = 0
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
        mark = json.dumps({"rank": self._rank, "step": current_step.step, "text": text})
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
            where=place(self._rank, self._world_size, step=current_step.step),
            why=f"rank {mark['rank']} ended in step {mark['step']}; this rank waited for it.",
            rank=mark["rank"],
        )

    def explain(self) -> PeerFailed | None:
        """What to raise instead of an error of a collective: the peer's failure behind it.

        None where no peer has said anything; a killed rank leaves no mark.
        """
        try:
            # A rank that fails leaves its mark before its connections close, so this is for a slow store.
            return self.failure(wait_s=0.1)
        except RuntimeError:
            return None  # the store is gone with rank 0: nothing more is known than the error says

    def new_scope(self) -> int:
        """A number for names that are used once. Collective: all ranks, as often as each other."""
        self.passed = 0  # before the number, as the thread reads them the other way round
        self._scopes += 1
        return self._scopes

    def leave_loop(self, step: int, *, updated: bool, timeout_s: float) -> None:
        """Wait until all ranks have left the loop after the same step.

        Args:
            updated: Whether this rank's update of the step was done; if not, no other can finish it,
                and is waited for only as long as one may be late for the same `break`.

        Raises:
            StepError: another rank goes on, or left after another step.

        Collective: all ranks, when they leave the loop early.
        """
        loop, scope = self._scopes, self.new_scope()
        wait_s = timeout_s if updated else min(timeout_s, _LATE_S)
        steps, missing = self.exchange(f"left/{scope}", step, step, loop=loop, timeout_s=wait_s)
        for rank, went_on in missing.items():
            instead = f"went on after step {went_on}" if went_on >= step else "did not"
            raise self._left_alone(rank, step, instead)
        for rank, their in enumerate(steps):
            if their != step:
                raise self._left_alone(rank, step, f"left after step {their}")

    def exchange(
        self, name: str, value: float, step: int, *, loop: int, timeout_s: float
    ) -> tuple[list[float], dict[int, int]]:
        """Tell a number under a name that is used once; everyone's, through the store.

        Args:
            loop: The scope in which `step` counts.

        Returns:
            The numbers in rank order, and the ranks that did not come: seen to have passed `step`,
            or late. The values are the steps that they have passed.

        Collective: all ranks, but a rank that comes alone gets an answer.
        """
        self._store.set(f"{name}/{self._rank}", json.dumps(value))
        self._store.set(_ASKED, "")
        deadline = time.monotonic() + timeout_s
        missing: dict[int, int] = {}
        for rank in range(self._world_size):
            while not self._store.check([f"{name}/{rank}"]):
                passed = self._passed_by(rank, loop)
                if passed >= step or time.monotonic() > deadline:
                    # It may have come and passed on since it was looked for; it tells before it passes.
                    if not self._store.check([f"{name}/{rank}"]):
                        missing[rank] = passed
                    break
                time.sleep(_POLL_S / 50)
        if missing:
            return [], missing
        return [json.loads(self._store.get(f"{name}/{r}")) for r in range(self._world_size)], {}

    def _passed_by(self, rank: int, loop: int) -> int:
        key = f"{_AT}/{rank}"
        if not self._store.check([key]):
            return 0
        scope, passed = map(int, self._store.get(key).split())
        return passed if scope >= loop else 0  # an answer from an earlier loop says nothing

    def _left_alone(self, rank: int, step: int, instead: str) -> StepError:
        return StepError(
            f"rank {self._rank} left the training loop after step {step}, rank {rank} {instead}.",
            where=place(self._rank, self._world_size, step=step),
            why="a `break` that only some ranks reach; the others would wait for ever.",
            fix="call `step.stop()` instead: all ranks then stop after the same step.",
            step=step,
        )

    def _answer(self, store: dist.Store) -> None:
        try:
            while not self._stop.wait(_POLL_S):
                if store.check([_ASKED]):
                    scope = self._scopes
                    store.set(f"{_AT}/{self._rank}", f"{scope} {self.passed}")
        except RuntimeError:
            return  # rank 0 and its store are gone; the main thread says what that means
