"""The one exchange of small values between the ranks of a job, on its control group.

Each call is an all-gather of one row of fixed size: a header, which names the call and the step, and the
value behind it. A value that does not fit follows in a second all-gather. All ranks read all headers. If they
differ, some ranks made a call that others did not, and every rank raises an error that names both. The
control word of a training is sent in the same way, so a rank that waits alone in a call receives it, and
both raise.

A rank may also go on without a call and then wait in a collective of the gradients, in which no header of its
own follows. So a rank that has waited for a moment writes its place in the program to the store. A thread of
each rank reads that, and sends a header on behalf of its rank if the rank has passed this place already.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from paceline.errors import CollectiveTimeout, PeerFailed, StepError, name_ranks, rank_location
from paceline.job import current_step

WORD = "control word"
LEFT_LOOP = "left the loop"
LEFT_JOB = "left the job"
_WENT_ON = ""  # sent by the thread of a rank that has passed a call

_HEADER = struct.Struct("<64sqq")  # the call, the step, and the size of the value in bytes
_ROW_BYTES = 512
_ROOM_BYTES = _ROW_BYTES - _HEADER.size
_GRACE_S = 0.5  # most ranks come within this time; a later one is asked for through the store
_POLL_S = 1.0
FOREVER = timedelta(days=3650)  # the timeout of the group; Gloo has no wait without one
_WAITING = "waiting"
ON_EVERY_RANK = "call it on every rank, without `if job.rank == 0`."

# The place of a rank in a step.
BEFORE_SUM, IN_SUM, AFTER_STEP = range(3)


class Place(NamedTuple):
    """How far a rank is; later places compare greater. The same on all ranks when they make a call."""

    loop: int
    step: int
    part: int


class Header(NamedTuple):
    """What a rank says about its call."""

    call: str
    step: int
    size: int


class Pending(NamedTuple):
    """A row that was sent, and not read yet.

    Attributes:
        number: Counts the rows of this rank, from 1.
        row: The group reads it until the work is done.
        numbers: What is summed over ranks behind the row; None without a sum.
    """

    number: int
    row: torch.Tensor
    rows: torch.Tensor
    work: dist.Work
    numbers: torch.Tensor | None
    sum_work: dist.Work | None


class Exchange:
    """The exchange of one job, as this rank sees it.

    Args:
        group: With the timeout `FOREVER`.
        timeout_s: How long a call waits for the other ranks, unless it says otherwise.

    Attributes:
        place: How far this rank is. The training writes it.

    All ranks make the same calls in the same order.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        store: dist.Store,
        *,
        timeout_s: float,
        reraise: Callable[[BaseException], NoReturn],
        failure: Callable[[], PeerFailed | None],
    ) -> None:
        self.place = Place(0, 0, BEFORE_SUM)
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._store = store
        self._timeout_s = timeout_s
        self._reraise = reraise
        self._failure = failure
        self._num_sent = 0
        self._sending = threading.Lock()
        self._stop = threading.Event()
        # The main thread may be in a blocking call of the store, which holds its client's lock.
        own_client: dist.Store = store.clone()  # type: ignore[attr-defined] # missing in torch's stubs
        self._thread = threading.Thread(
            target=self._answer, args=(own_client,), name="paceline-exchange", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(timeout=5)

    def begin_loop(self) -> None:
        """A loop over steps begins. All ranks call it."""
        self.place = Place(self.place.loop + 1, 0, BEFORE_SUM)

    def advance(self, step: int, part: int) -> None:
        """This rank has come to a part of a step."""
        # A step that is lower than the last one belongs to an outer loop, in whose body another has run.
        goes_back = (step, part) < self.place[1:]
        self.place = Place(self.place.loop + goes_back, step, part)

    def gather(
        self, call: str, value: Any, *, fix: str = ON_EVERY_RANK, has_timeout: bool = True
    ) -> list[Any]:
        """The values of all ranks, in rank order. A value may be anything that JSON can represent.

        Args:
            call: Which call it is, for the error.
            has_timeout: Whether other ranks must come within the timeout of the job.

        Raises:
            StepError: on all ranks, if some have made another call, or went on without one.
            CollectiveTimeout: a rank did not come; it is named.
            PeerFailed: another rank failed instead.
        """
        body = json.dumps(value).encode()
        bodies = self.gather_bytes(call, body, fix=fix, has_timeout=has_timeout)
        return [json.loads(each) for each in bodies]

    def gather_bytes(
        self, call: str, body: bytes, *, fix: str = ON_EVERY_RANK, has_timeout: bool = True
    ) -> list[bytes]:
        """The bytes of all ranks, in rank order; their sizes may differ. See `gather`."""
        pending = self.send(call, body)
        headers = self._read_headers(pending, fix=fix, has_timeout=has_timeout)
        rows = pending.rows[:, _HEADER.size :]
        if (largest := max(header.size for header in headers)) > _ROOM_BYTES:
            whole = torch.zeros(largest, dtype=torch.uint8)
            if body:
                whole[: len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
            rows = whole.new_empty(self._size, largest)
            self._wait_long(self._all_gather(rows, whole))
        pairs = zip(rows, headers, strict=True)
        return [row[: header.size].numpy().tobytes() for row, header in pairs]

    def send(self, call: str, body: bytes = b"", numbers: torch.Tensor | None = None) -> Pending:
        """Send a row, and begin to sum `numbers` over the ranks in place; waits for nobody."""
        with self._sending:
            return self._send(call, body, numbers)

    def _send(self, call: str, body: bytes, numbers: torch.Tensor | None) -> Pending:
        header = _HEADER.pack(call.encode(), current_step.step, len(body))
        data = (header + body[:_ROOM_BYTES]).ljust(_ROW_BYTES, b"\0")
        row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = row.new_empty(self._size, _ROW_BYTES)
        try:
            work = self._all_gather(rows, row)
            sum_work = None
            if numbers is not None:
                sum_work = dist.all_reduce(numbers, group=self._group, async_op=True)
        except RuntimeError as error:
            self._reraise(error)
        self._num_sent += 1
        return Pending(self._num_sent, row, rows, work, numbers, sum_work)

    def _all_gather(self, rows: torch.Tensor, row: torch.Tensor) -> Any:
        return dist.all_gather(list(rows.unbind()), row, group=self._group, async_op=True)

    def read_sum(self, pending: Pending) -> list[float]:
        """The numbers of a row that was sent with some, summed over all ranks. See `gather`."""
        self._read_headers(pending)
        assert pending.numbers is not None
        assert pending.sum_work is not None
        self._wait_long(pending.sum_work)
        numbers: list[float] = pending.numbers.tolist()
        return numbers

    def _read_headers(
        self, pending: Pending, *, fix: str = ON_EVERY_RANK, has_timeout: bool = True
    ) -> list[Header]:
        if not self._wait(pending.work, timedelta(seconds=_GRACE_S)):
            self._say_waiting(pending.number)
            timeout_s = self._timeout_s if has_timeout else math.inf
            if not self._wait_long(pending.work, timeout_s):
                raise self._timeout_error(pending.number)
        headers = []
        for row in pending.rows:
            call, step, size = _HEADER.unpack(row[: _HEADER.size].numpy().tobytes())
            headers.append(Header(call.rstrip(b"\0").decode(errors="replace"), step, size))
        own = headers[self._rank]
        if any(header[:2] != own[:2] for header in headers):
            raise disagreement(headers, self._rank, fix=fix)
        return headers

    def _say_waiting(self, number: int) -> None:
        waiting = json.dumps([number, *self.place])
        # Where rank 0 serves the store, it may have left the job, and the store with it, just after it sent
        # its row; the row then arrives.
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{_WAITING}/{self._rank}", waiting)
            self._store.set(_WAITING, waiting)

    def _failure_of_peer(self) -> PeerFailed | None:
        try:
            return self._failure()
        except RuntimeError:
            return None  # as above

    def _wait_long(self, work: dist.Work, timeout_s: float = math.inf) -> bool:
        """As `_wait`. A peer that failed, and whose process goes on, keeps its connections: see its mark."""
        deadline = time.monotonic() + timeout_s
        # In parts, because Python handles no signal while it waits in native code.
        while not self._wait(work, timedelta(seconds=1)):
            if (failure := self._failure_of_peer()) is not None:
                raise failure
            if time.monotonic() > deadline:
                return False
        return True

    def _wait(self, work: dist.Work, timeout: timedelta) -> bool:
        """Wait for a work; False if it is not done in time."""
        try:
            work.wait(timeout)
        except RuntimeError:
            if not work.is_completed():
                return False
            # It may have been completed since the timeout; if it failed, this raises its error again.
            try:
                work.wait()
            except RuntimeError as error:
                self._reraise(error)
        return True

    def _timeout_error(self, number: int) -> CollectiveTimeout:
        missing = []
        for rank in range(self._size):
            key = f"{_WAITING}/{rank}"
            if not self._store.check([key]) or json.loads(self._store.get(key))[0] < number:
                missing.append(rank)
        return CollectiveTimeout(
            f"{name_ranks(missing)} did not come within {self._timeout_s:g} s.",
            where=rank_location(self._rank, self._size, step=current_step.step),
            why="the other ranks wait for a value of it.",
            fix="see the output of that rank; if it only needs longer, raise `timeout_s` of `join`.",
            missing=missing,
            waited_s=self._timeout_s,
        )

    def _answer(self, store: dist.Store) -> None:
        """The thread: send rows for calls that this rank has passed, and to which it can come no more."""
        while not self._stop.wait(_POLL_S):
            try:
                if not store.check([_WAITING]):
                    continue
                number, *place = json.loads(store.get(_WAITING))
                with self._sending:
                    while self._num_sent < number and Place(*place) < self.place:
                        self._send(_WENT_ON, b"", None)
            except RuntimeError:
                return  # the store or the group has ended; the main thread reports it


class StoreExchange(Exchange):
    """Exchanges values through the store, among ranks whose connections to each other are broken."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._num_sent = 0

    def send(self, call: str, body: bytes = b"", numbers: torch.Tensor | None = None) -> Any:
        self._num_sent += 1
        self._store.set(f"gather/{self._num_sent}/{self._rank}", body)  # type: ignore[arg-type] # bytes too

    def gather_bytes(
        self, call: str, body: bytes, *, fix: str = ON_EVERY_RANK, has_timeout: bool = True
    ) -> list[bytes]:
        self.send(call, body)
        keys = [f"gather/{self._num_sent}/{rank}" for rank in range(self._size)]
        return [self._store.get(key) for key in keys]  # each waits for its rank

    def close(self) -> None:
        """There is no thread."""


def disagreement(
    headers: Sequence[Header], rank: int, *, fix: str = ON_EVERY_RANK
) -> StepError | PeerFailed:
    """The error of a rank if the headers of the ranks differ."""
    named = headers[rank]
    goes_on = (WORD, LEFT_JOB, _WENT_ON)  # what a rank does that makes no call of the user
    if named.call in goes_on:
        named = next((each for each in headers if each.call not in goes_on), named)
    ranks_at: dict[tuple[str, int], list[int]] = {}
    for r, each in enumerate(headers):
        ranks_at.setdefault(each[:2], []).append(r)
    callers = ranks_at.pop(named[:2])
    others = name_ranks(r for ranks in ranks_at.values() for r in ranks)
    what = f"{others} did not call `{named.call}` at this point, {name_ranks(callers)} did."
    if named.call == LEFT_LOOP:
        what = f"{name_ranks(callers)} left the training loop after step {named.step}, {others} did not."
        fix = (
            "call `step.stop()` instead of `break`, `return` or `sys.exit`: all ranks then stop after the "
            "same step."
        )
    elif named.call in goes_on:
        what = f"{_describe(callers, named)}, {others} did not."
    places = ", ".join(_describe(ranks, Header(*at, 0)) for at, ranks in ranks_at.items())
    parts: dict[str, Any] = {
        "where": rank_location(rank, len(headers), step=named.step or None),
        "why": f"{places}; ranks that make a call alone would wait forever.",
        "fix": fix,
        "step": named.step,
    }
    if headers[rank].call == LEFT_JOB and named.call not in goes_on:
        # This error has the line of `with paceline.join()`; the launcher must show the line of the call.
        return PeerFailed(what, **parts, rank=callers[0])
    return StepError(what, **parts)


def _describe(ranks: Sequence[int], header: Header) -> str:
    who = name_ranks(ranks)
    if header.call == _WENT_ON:
        return f"{who} went on in step {header.step}"
    if header.call == WORD:
        return f"{who} ended step {header.step}"
    if header.call == LEFT_LOOP:
        return f"{who} left the training loop in step {header.step}"
    if header.call == LEFT_JOB:
        return f"{who} left the training and the job"
    return f"{who} called `{header.call}` in step {header.step}"
