"""Between hosts: what the first ranks of each exchange over Gloo, and what they tell each other in the store.

Gloo does not say who is behind a broken or silent connection. So a first rank leaves word in the store when
it gives its group up and when it waits on its own host, and a roll call there finds who says nothing.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import CollectiveTimeout, PacelineError, PeerFailed

# Yields whether it has issued all that it will, so that another may begin: hosts must issue in one order.
Crossing = Generator[bool, None, None]

ROLL_CALL_S = 1.5
_ASK_S = 0.25
_BROKEN = "broken"


class Wire:
    """What the first rank of a host has of the others.

    Attributes:
        under_way: how many messages are.
        over: how many operations of the group are over here.

    Collective: the first ranks of all hosts; each generator, in the same order.
    """

    def __init__(
        self, store: dist.Store, gloo: Any, leaders: Sequence[int], here: int, where: str
    ) -> None:
        self.under_way = 0
        self.over = 0
        # The rank itself may sit in a blocking call of the store, which holds its client's lock.
        self._store = store.clone()  # type: ignore[attr-defined] # missing in torch's stubs
        self._gloo = gloo
        self._leaders = leaders
        self._here = here
        self._where = where
        self._asked = 0.0
        self._said: Sequence[int] = ()

    def gather(self, rows: Sequence[torch.Tensor], mine: torch.Tensor) -> Crossing:
        """Everyone's `mine`, in the order of hosts. The tensors of this and the next are flat."""
        rows = [row.view(torch.uint8) for row in rows]
        yield from self._until(self._gloo.allgather([rows], [mine.view(torch.uint8)]), last=True)

    def exchange(self, theirs: torch.Tensor, mine: torch.Tensor) -> Crossing:
        """The n-th part of `mine` for the n-th host, its part for this one in `theirs`; `gather` follows."""
        sides = theirs.view(torch.uint8), mine.view(torch.uint8)
        yield from self._until(self._gloo.alltoall_base(*sides, [], []), last=False)

    def broadcast(self, part: torch.Tensor, host: int) -> Crossing:
        """Host `host`'s bytes for all."""
        yield from self._until(self._gloo.broadcast(part, host), last=True)

    def _until(self, work: dist.Work, *, last: bool) -> Crossing:
        self.under_way += 1
        try:
            while not work.is_completed():
                yield last
        finally:
            self.under_way -= 1
        try:
            work.wait()
        except RuntimeError as error:
            raise self.lost(late=False) from error

    def look(self, missing: Sequence[int], *, late: bool) -> PacelineError | None:
        """What has happened elsewhere, now and then; `missing` are those of this host who have not come."""
        if late:
            return self.lost(late=True)
        now = time.monotonic()
        if now - self._asked < _ASK_S:
            return None
        self._asked = now
        try:
            if missing and (self.over, *missing) != self._said:
                self._said = (self.over, *missing)
                self._tell(missing)
            return self._failure()
        except RuntimeError:
            return None  # the store is gone with its host: the connections will tell

    def give_up(self, rank: int, text: str) -> None:
        """Leave word why this host takes no part any more, unless another was first."""
        word = json.dumps([self.over, self._leaders[self._here], rank, text])
        with contextlib.suppress(RuntimeError):  # the store may be gone
            self._store.compare_set(_BROKEN, "", word)

    def lost(self, *, late: bool) -> PacelineError:
        """Why other hosts do not answer: a word that one has left, or who is absent from a roll call."""
        waits: list[list[int] | None] = [None if r != self._here else [] for r in self._hosts]
        deadline = time.monotonic() + ROLL_CALL_S
        with contextlib.suppress(RuntimeError):  # of a store that is gone
            self._tell([])
            while None in waits and time.monotonic() < deadline:
                if failure := self._failure():
                    return failure
                waits = [self._waits_of(host) for host in self._hosts]
                time.sleep(0.02)
        missing = [self._leaders[host] for host in self._hosts if waits[host] is None]
        missing += [rank for ranks in waits for rank in ranks or ()]
        who = ", ".join(f"rank {rank}" for rank in missing) or "no rank in particular"
        facts: dict[str, Any] = {"where": self._where, "missing": missing, "cause_known": False}
        if late:
            return CollectiveTimeout(
                f"after the timeout of a collective, these of other hosts did not come: {who}.",
                **facts,
            )
        return PeerFailed(
            f"the connection between hosts broke; {who} cannot be reached.",
            rank=missing[0] if missing else None,
            **facts,
        )

    @property
    def _hosts(self) -> range:
        return range(len(self._leaders))

    def _tell(self, missing: Sequence[int]) -> None:
        self._store.set(f"at/{self._here}", json.dumps([self.over, list(missing)]))

    def _waits_of(self, host: int) -> list[int] | None:
        """For whom a host waits in the operation that this one is in; None where it is not there."""
        if not self._store.check([f"at/{host}"]):
            return None
        over, missing = json.loads(self._store.get(f"at/{host}"))
        return missing if over == self.over else None

    def _failure(self) -> PeerFailed | None:
        if not self._store.check([_BROKEN]):
            return None
        over, teller, rank, text = json.loads(self._store.get(_BROKEN))
        if over > self.over:
            return None  # it has done its part of what this host still does
        behind = f" because of rank {rank}" if rank != teller else ""
        return PeerFailed(
            f"rank {teller} gave this group up{behind}: {text}",
            where=self._where,
            rank=rank,
            cause_known=False,
        )
