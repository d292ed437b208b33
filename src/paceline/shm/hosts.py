"""A group over several hosts: ranks of one meet in memory, the first ranks of each meet over Gloo.

Elements are added in rank order within a host, then host by host in the order of their first ranks: the bits
depend on which rank is where, and on nothing else. A tensor goes in parts, so that one part crosses while
the next is added up.
"""

# mypy: disable-error-code="no-untyped-call"
# It is `Tensor.split` that has no types.

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import PacelineError
from paceline.errors import place as where_of
from paceline.machine import usable_cores
from paceline.shm.folding import AVG, HALVES, SUM, fold
from paceline.shm.rounds import Mismatch, Rounds, Steps, describe, note_of
from paceline.shm.segment import Segment, Unavailable, open_segment, place
from paceline.shm.wire import ROLL_CALL_S, Crossing, Wire

_HEAD_BYTES, _NOTE_BYTES = 4096, 64  # of the first message between hosts, and of the note in it
_ROOM_BYTES = _HEAD_BYTES - _NOTE_BYTES
_PART_BYTES = (256 << 10, 2 << 20)
_AT_ONCE = 2  # parts under way between hosts: as many as Gloo has threads
_SMALL_BYTES = 64 << 10  # up to here each host adds everything up, which saves a message


class HostRounds(Rounds):
    """The collectives of a group that has ranks on several hosts, one at a time.

    Args:
        hosts: The group's ranks on each host.
        names: For each rank of the group its number in the job.
        wire: The other hosts, on the first rank of this one.

    Attributes:
        ranks: The numbers in the job of this host's ranks, then of all others.

    Collective: all ranks of the group; each method, in the same order.
    """

    leaves = frozenset(
        ("reduce", "gather", "scatter", "alltoall", "all_to_all_single")
        + ("allgather", "all_gather_single", "all_gather_single_coalesced")
    )
    patience_s = 2 * ROLL_CALL_S  # until the first rank has heard who is late

    def __init__(
        self,
        segment: Segment,
        hosts: Sequence[Sequence[int]],
        here: int,
        names: Sequence[int],
        wire: Wire | None,
        *,
        spin: bool,
    ) -> None:
        self._wire = wire
        super().__init__(segment, spin=spin)
        self._hosts = hosts
        self._here = here
        self._seats = {rank: (h, i) for h, own in enumerate(hosts) for i, rank in enumerate(own)}
        own = hosts[here]
        self._order = [*own, *(rank for rank in range(len(names)) if rank not in own)]
        self.ranks = [names[rank] for rank in self._order]

    @property
    def away(self) -> bool:
        return self._wire is not None and self._wire.under_way > 0

    def look(self, missing: Sequence[int], *, late: bool) -> PacelineError | None:
        if self._wire is None:
            return None
        return self._wire.look([self.ranks[r] for r in missing], late=late)

    def culprit(self, error: BaseException) -> int:
        facts = error.facts if isinstance(error, PacelineError) else {}
        named = [facts.get("rank"), *facts.get("missing", ())]
        return next((self.ranks.index(r) for r in named if r in self.ranks), self._rank)

    def gave_up(self, error: BaseException, culprit: int) -> None:
        if self._wire is not None:
            text = error.what if isinstance(error, PacelineError) else repr(error)
            self._wire.give_up(self.ranks[culprit], text)

    def barrier(self) -> Steps:
        call = ("barrier", torch.uint8, 0, 0, -1)
        yield from self._meet_for(*call)
        yield from self._greet(note_of(*call), torch.empty(0))
        self._end()

    def all_reduce(self, flat: torch.Tensor, op: int, region: int | None = None) -> Steps:
        yield from self._sum("all_reduce", flat, op)

    def reduce_scatter(self, pieces: Sequence[torch.Tensor], out: torch.Tensor, op: int) -> Steps:
        whole = torch.cat(list(pieces))
        yield from self._sum("reduce_scatter", whole, op)
        own = self._hosts[self._here][self._rank] * len(out)
        out.copy_(whole[own : own + len(out)])

    def _sum(self, kind: str, flat: torch.Tensor, op: int) -> Steps:
        call = (kind, flat.dtype, len(flat), op, -1)
        mean = op == AVG
        op = SUM if mean else op
        # A sum of 16-bit floats crosses in 16 bits; that of a mean might overflow.
        into = flat.float() if mean and flat.dtype in HALVES else flat
        head, parts = _cut(into)
        if parts:  # else the first sum compares as much
            yield from self._meet_for(*call)

        def inward(part: torch.Tensor) -> Steps:
            return super(HostRounds, self).all_reduce(part, op) if self._size > 1 else _nothing()

        yield from inward(head)
        yield from self._greet(note_of(*call), head, lambda rows: fold(op, rows, head))
        yield from self._flow(parts, inward, lambda part: self._fold_across(part, op), self._spread)
        if mean:
            into.div_(len(self.ranks))
        if into is not flat:
            flat.copy_(into)
        self._end()

    def _fold_across(self, part: torch.Tensor, op: int) -> Crossing:
        """Reduce `part` over hosts, in place: all of it on each, or a share on each where that is less."""
        assert self._wire is not None
        hosts = len(self._hosts)
        if hosts == 2 or part.nbytes <= _SMALL_BYTES:
            rows = [torch.empty_like(part) for _ in self._hosts]
            yield from self._wire.gather(rows, part)
            fold(op, rows, part)
            return
        share = -(-len(part) // hosts)
        mine, theirs = part.new_zeros(hosts * share), part.new_empty(hosts * share)
        mine[: len(part)] = part
        yield from self._wire.exchange(theirs, mine)
        total = part.new_empty(share)
        fold(op, theirs.split(share), total)
        yield from self._wire.gather(mine.split(share), total)
        part.copy_(mine[: len(part)])

    def share(
        self,
        kind: str,
        mine: torch.Tensor | None,
        into: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
        count: int,
        root: int = -1,
    ) -> Steps:
        call = (kind, dtype, count, 0, root)
        yield from self._meet_for(*call)
        assert kind == "broadcast"
        flat = mine if mine is not None else into[root]
        assert flat is not None
        host, seat = self._seats[root]
        at_home = host == self._here
        head, parts = _cut(flat.view(torch.uint8))

        def inward(part: torch.Tensor) -> Steps:
            return self._spread(part, seat) if at_home else _nothing()

        def across(part: torch.Tensor) -> Crossing:
            assert self._wire is not None
            return self._wire.broadcast(part, host)

        def outward(part: torch.Tensor) -> Steps:
            return _nothing() if at_home else self._spread(part)

        yield from inward(head)
        yield from self._greet(note_of(*call), head, lambda rows: head.copy_(rows[host]))
        yield from self._flow(parts, inward, across, outward)
        self._end()

    def _greet(
        self,
        note: int,
        head: torch.Tensor,
        put: Callable[[list[torch.Tensor]], object] = len,
    ) -> Steps:
        """All ranks see that all hosts want the same, and have in `head` what `put` makes of all heads.

        The message has one size whatever the hosts want: what Gloo does with two sizes is not to be known.
        """
        answer = torch.empty(8 * len(self._hosts) + head.nbytes, dtype=torch.uint8)
        notes = answer[: 8 * len(self._hosts)].view(torch.int64)
        body = answer[notes.nbytes :].view(head.dtype)
        if self._wire is not None:
            mine = torch.zeros(_HEAD_BYTES, dtype=torch.uint8)
            mine[:8].view(torch.int64).fill_(note)
            mine[_NOTE_BYTES : _NOTE_BYTES + head.nbytes] = head.view(torch.uint8)
            rows = [torch.empty_like(mine) for _ in self._hosts]
            for _ in self._wire.gather(rows, mine):
                yield
            torch.cat([row[:8].view(torch.int64) for row in rows], out=notes)
            if bool(notes.eq(note).all()):
                end = _NOTE_BYTES + head.nbytes
                put([row[_NOTE_BYTES:end].view(head.dtype) for row in rows])
                body.copy_(head)
        yield from self._spread(answer)
        said = notes.tolist()
        if said.count(note) != len(said):
            texts = [describe(said[self._seats[rank][0]]) for rank in self._order]
            texts[self._rank] = describe(note)
            raise Mismatch(texts)
        if self._wire is None:
            head.copy_(body)

    def _spread(self, part: torch.Tensor, seat: int = 0) -> Steps:
        """What the rank of this host at `seat` has, to all of the host."""
        if self._size == 1:
            return _nothing()
        part = part.view(torch.uint8)
        into: list[torch.Tensor | None] = [None] * self._size
        gives = part if self._rank == seat else None
        into[seat] = None if self._rank == seat else part
        return super().share("broadcast", gives, into, torch.uint8, len(part), seat)

    def _flow(
        self,
        parts: Sequence[torch.Tensor],
        inward: Callable[[torch.Tensor], Steps],
        across: Callable[[torch.Tensor], Crossing],
        outward: Callable[[torch.Tensor], Steps],
    ) -> Steps:
        """Parts one after the other into the first rank, between hosts, and out; two cross at a time.

        One alone leaves the connection idle in one of its directions for a third of the time.
        """
        going: deque[_Going] = deque()
        for part in (*parts, *[None] * _AT_ONCE):
            if part is not None:
                yield from _beside(going, inward(part))
            first = going[0] if going and (part is None or len(going) == _AT_ONCE) else None
            if first is not None:
                _carry_on(going)
                while not first.over:
                    yield
                    _carry_on(going)
                going.popleft()
            if part is not None:
                going.append(_Going(part, across(part) if self._wire else None))
            if first is not None:
                yield from _beside(going, outward(first.part))

    def _end(self) -> None:
        if self._wire is not None:
            self._wire.over += 1


def open_rounds(options: Any) -> tuple[Rounds, Sequence[int]]:
    """The collectives of a new group, and its ranks as the job numbers them: those of this host first.

    Args:
        options: What torch gives to those who make a group.

    Raises:
        Unavailable: on all ranks alike, where no two are on one host, or a host has no memory to share.

    Collective: all ranks of the group, once.
    """
    store, rank, size = options.store, options.group_rank, options.group_size
    timeout = options.timeout
    names = list(options.global_ranks_in_group) or list(range(size))
    places = _told(store, "place", rank, size, place(), timeout)
    hosts = [[r for r in range(size) if places[r] == each] for each in dict.fromkeys(places)]
    if len(hosts) == size:
        boots = {each.partition(" ")[0] for each in places}
        raise Unavailable("containers that do not see each other" if len(boots) < size else "")
    here = next(h for h, own in enumerate(hosts) if rank in own)
    own, why = hosts[here], ""
    try:
        nearby = dist.PrefixStore(f"shm/{here}", store)
        segment = open_segment(nearby, own.index(rank), len(own), timeout)
    except Unavailable as error:
        why = str(error)
    whys = _told(store, "shm", rank, size, why, timeout) if len(hosts) > 1 else [why]
    if why := next(filter(None, whys), ""):
        raise Unavailable(why)
    spin = len(own) <= usable_cores()
    if len(hosts) == 1:
        return Rounds(segment, spin=spin), names
    wire = None
    if rank == own[0]:
        far = dist.PrefixStore("hosts", store)
        gloo = dist.ProcessGroupGloo(far, here, len(hosts), timeout)
        gloo.set_timeout(timeout + timedelta(seconds=HostRounds.patience_s))  # ours comes first
        where = where_of(names[rank], size, detail="backend shm")
        wire = Wire(far, gloo, [names[each[0]] for each in hosts], here, where)
    rounds = HostRounds(segment, hosts, here, names, wire, spin=spin)
    return rounds, rounds.ranks


def _told(
    store: dist.Store, name: str, rank: int, size: int, value: str, timeout: timedelta
) -> list[str]:
    """What every rank says, in rank order."""
    keys = [f"{name}/{r}" for r in range(size)]
    store.set(keys[rank], value)
    store.wait(keys, timeout)
    return [each.decode() for each in store.multi_get(keys)]


def _cut(flat: torch.Tensor) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """What goes with the first message; the rest in parts, four if they are not too small or large."""
    width, (least, most) = flat.dtype.itemsize, _PART_BYTES
    room = _ROOM_BYTES // width
    rest = flat[room:]
    part = min(most, max(least, rest.nbytes // 4)) // width
    return flat[:room], rest.split(part) if len(rest) else ()


class _Going:
    """A part that crosses, or will."""

    def __init__(self, part: torch.Tensor, crossing: Crossing | None) -> None:
        self.part = part
        self.over = crossing is None
        self._crossing = crossing

    def carry_on(self) -> bool:
        """Whether the next may begin."""
        try:
            return self._crossing is None or next(self._crossing)
        except StopIteration:
            self.over, self._crossing = True, None
            return True


def _carry_on(going: Iterable[_Going]) -> None:
    all(each.carry_on() for each in going)


def _beside(going: Iterable[_Going], steps: Steps) -> Steps:
    """Carry on what crosses while `steps` are carried on, until these are over."""
    _carry_on(going)
    for _ in steps:
        _carry_on(going)
        yield


def _nothing() -> Steps:
    yield from ()
