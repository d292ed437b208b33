"""Which rank failed first, and why: from facts to a verdict. Pure: no clock, no process, no output.

When one rank fails, its peers fail a moment later because they lost it. Only the first failure is worth
reading. Followers are told apart by where their error was raised and by its type, never by its text.
A rank that ended with 0 failed nothing, but may be the peer that the followers lost.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

# Raised where a rank waits for others.
_WAITING = ("torch.distributed", "torch.autograd", "torch.nn.parallel.distributed")
_LOST_PEER_TYPES = frozenset({"torch.distributed.DistError", "paceline.errors.PeerFailed"})

# An error is dated by its rank and an end by the launcher, which may see it a moment late.
_SEEN_LATE_S = 0.5

# The traceback has the whole text; Gloo's is a paragraph.
_HOW_CHARS = 160


@dataclass(frozen=True, kw_only=True)
class Error:
    """An exception that ended a rank's script.

    Args:
        kinds: Qualified names of its class and the bases of it.
        module: The module of the innermost frame.
        place: File, line and function of the innermost frame that is no library's.
        shown: Whether the script's own hook showed it already.
    """

    type: str
    kinds: tuple[str, ...]
    message: str
    traceback: str
    module: str
    place: str
    shown: bool = False


@dataclass(frozen=True, kw_only=True)
class Fact:
    """What became of one rank.

    Args:
        time: Seconds since the epoch of the error, or else of the end.
        returncode: As subprocess gives it: negative for a signal; None while it runs.
        exit_place: Where the script called sys.exit(); None if it did not.
        stopped: It ran until the launcher stopped it, so its end says nothing.
        hung: The launcher stopped it because it held up the others.
        frozen_s: For how long SIGSTOP had held it when the launcher killed it for that; else 0.
        step: The training step that an error came in; 0 where that is not known.
        gave_up: What native code wrote when it aborted; empty where it wrote nothing.
        elsewhere: Its launcher is another one, which has told this.
        within_s: By how much `time` may be wrong, as clocks of hosts can be compared.
    """

    rank: int
    host: str
    pid: int
    time: float
    returncode: int | None
    error: Error | None = None
    exit_place: str | None = None
    stopped: bool = False
    hung: bool = False
    frozen_s: float = 0.0
    step: int = 0
    gave_up: str = ""
    elsewhere: bool = False
    within_s: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether the rank failed by itself."""
        ended_badly = self.error is not None or self.returncode not in (None, 0)
        return self.hung or (not self.stopped and ended_badly)

    @property
    def follows(self) -> bool:
        """Whether this looks like the failure of a rank that lost a peer."""
        error = self.error
        if error is None or self.hung:
            return False
        if not _LOST_PEER_TYPES.isdisjoint(error.kinds):
            return True
        return error.kinds[:1] == ("builtins.RuntimeError",) and error.module.startswith(_WAITING)

    @property
    def left(self) -> bool:
        """Whether the rank ended well, and not because it was told to."""
        return not self.stopped and self.error is None and self.returncode == 0

    @property
    def how(self) -> str:
        """The failure in a few words, equal for ranks that failed alike."""
        if self.hung:
            return "held up the others" + (", as said above" if not self.elsewhere else "")
        if self.error is not None:
            text = self.error.message.strip().split("\n", 1)[0]
            if len(text) > _HOW_CHARS:
                text = f"{text[:_HOW_CHARS]} ..."
            return f"{self.error.type}: {text}" if text else self.error.type
        if self.frozen_s:
            return f"stopped by SIGSTOP, and killed after {self.frozen_s:.0f} s"
        if self.returncode is not None and self.returncode < 0:
            return f"killed by {signal_name(-self.returncode)}"
        if self.returncode == 0:
            return "ended with exit code 0 while the others went on"
        return f"exit code {self.returncode}"


@dataclass(frozen=True)
class Verdict:
    """The first failure and what the others were.

    Args:
        original: What the job ended of: a failure, or a rank that left while others needed it.
        alike: All ranks that failed in the same way, the original's among them.
        followers: Ranks that only lost a peer.
        others: Ranks that failed by themselves, later, and in another way.
        certain: False where all ranks that failed here only followed.
        first_follower: The first of them; None where `certain`.
    """

    original: Fact
    alike: tuple[int, ...]
    followers: tuple[int, ...]
    others: tuple[Fact, ...]
    certain: bool
    first_follower: Fact | None = None

    def repeats(self, before: Verdict) -> bool:
        """Whether this is the exception of the round before, in the same step."""
        this, last = self.original, before.original
        return (
            this.error is not None
            and last.error is not None
            and this.step == last.step > 0
            and (this.error.type, this.error.place) == (last.error.type, last.error.place)
        )

    def tells_apart(self, fact: Fact) -> bool:
        """Whether this failure surely came after the original, by the clocks of two hosts."""
        first = self.original
        within_s = fact.within_s + first.within_s if fact.host != first.host else 0.0
        return fact.time - first.time >= within_s

    @property
    def exit_code(self) -> int:
        """What `paceline run` exits with."""
        code = self.original.returncode
        if not code or self.original.hung or (self.original.error is not None and code < 0):
            return 1  # also where it was stopped before it had ended
        return 128 - code if code < 0 else code


def judge(facts: Iterable[Fact]) -> Verdict | None:
    """The verdict on one round; None if no rank failed."""
    in_time = sorted(facts, key=lambda fact: fact.time)
    failures = [fact for fact in in_time if fact.failed]
    if not failures:
        return None
    causes = [fact for fact in failures if not fact.follows]
    latest = failures[0].time + failures[0].within_s + _SEEN_LATE_S
    left = [] if causes else [f for f in in_time if f.left and f.time - f.within_s <= latest]
    original = (causes or left or failures)[0]
    alike = left or [fact for fact in failures if fact.how == original.how]
    rest = [fact for fact in failures if fact.how != original.how]
    return Verdict(
        original=original,
        alike=tuple(sorted(fact.rank for fact in alike)),
        followers=tuple(sorted(fact.rank for fact in rest if fact.follows)),
        others=tuple(fact for fact in rest if not fact.follows),
        certain=bool(causes),
        first_follower=None if causes else failures[0],
    )


def signal_name(number: int) -> str:
    """The name of a signal, also of one that Python does not know."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
