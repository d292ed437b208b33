"""Which rank failed first, and which ranks failed only because they lost it. Pure.

When one rank fails, its peers fail a moment later because they lost it. Only the first failure matters.
A follower is recognised by the type of its error and by what raised it, never by the words of its message.
The errors behind it (`__cause__`, `__context__`) count too: a script may wrap an error of torch.distributed
in its own, or fail again in the `finally` block after it. A rank that ended with exit code 0 did not fail,
but may be the peer that the followers lost.

launch/worker.py loads this file without importing the package `paceline`, so it may import only the standard
library, exit_codes.py and stacks.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from traceback import walk_tb

from paceline.exit_codes import ExitCode, signal_name
from paceline.watch.stacks import Stack, frames_of_script, is_script, place_of_error, stack_of_error

# A RuntimeError means that a peer was lost if it names the line of Gloo's source that raised it: first, or
# anywhere if a function of torch.distributed raised it, which may put words before it. One of RPC does if RPC
# itself or TensorPipe raised it. The rest are errors of the script: split sizes that do not fit, a second
# backward of one graph, or what a function raised that was called by RPC.
_RPC = "torch.distributed.rpc"
_RPC_ERROR = re.compile(r"RPCErr:|.*this error originated at tensorpipe/")
_COLLECTIVES = "torch.distributed.distributed_c10d"
# Of Gloo; and, in a backward, of a future of `shm`.
_GROUP_ERROR = re.compile(
    r"\[\S*gloo/\S+:\d+\]|Got the following error when running the callback: PeerFailed:"
)
_LOST_PEER_TYPES = frozenset({"torch.distributed.DistError", "paceline.errors.PeerFailed"})
_OWN_ERRORS = "paceline.errors.PacelineError"
_CHECKPOINT_ERROR = "torch.distributed.checkpoint.api.CheckpointException"
_ENDS = (StopIteration, StopAsyncIteration, GeneratorExit)

# The rank itself reports the time of an error. The launcher notices an end up to this much later.
_NOTICED_LATE_S = 0.5

# Of the message, in one line of the report; the traceback has all of it.
_HOW_CHARS = 160


@dataclass(frozen=True, kw_only=True)
class Error:
    """An exception that ended a rank's script.

    Args:
        kinds: Qualified names of its class and its base classes.
        module: The module of the innermost frame.
        place: `file:line in function` of the innermost frame of the script.
        lost_peer: Whether it was raised because a peer was lost.
        masked: Whether an error about a lost peer replaced it, in a `finally`, `except` or `with` block. The
            traceback has both; the other fields are those of this error, but `lost_peer` is True.
        causes: Type and message of each error in its chain of `__cause__`, the first cause first, in lines.
        shown: Whether the script's own sys.excepthook has printed it already.
        exit_code: Of a rank that it ends.
    """

    type: str
    kinds: tuple[str, ...]
    message: str
    traceback: str
    module: str
    place: str
    lost_peer: bool = False
    masked: bool = False
    causes: str = ""
    shown: bool = False
    exit_code: int = 1

    @classmethod
    def of(cls, error: BaseException, text: str) -> Error:
        """The facts about an exception of this process; `text` is its traceback."""
        lost_peer = _lost_peer(error)
        masked = None
        if lost_peer:
            masked = find_own_error(_behind(error), stack_of_error(error.__traceback__))
        error = masked or error
        return cls(
            type=type(error).__qualname__,
            kinds=_kinds(error),
            message=_message(error),
            traceback=text,
            module=_module(error),
            place=place_of_error(error.__traceback__),
            lost_peer=lost_peer,
            masked=masked is not None,
            causes=_causes(error),
            exit_code=exit_code_of(error),
        )

    @property
    def text(self) -> str:
        """Type and message in one line."""
        text = self.message.strip().split("\n", 1)[0]
        if len(text) > _HOW_CHARS:
            text = f"{text[:_HOW_CHARS]} ..."
        return f"{self.type}: {text}" if text else self.type


def own_errors(error: BaseException | None, stack: Stack) -> list[BaseException]:
    """All exceptions that `find_own_error` may find, the innermost first."""
    found: list[BaseException] = []
    while (own := find_own_error(error, stack)) is not None and all(own is not e for e in found):
        found.append(own)
        error = _behind(own)
    return found


def find_own_error(error: BaseException | None, stack: Stack) -> BaseException | None:
    """Of an exception that is being handled and those behind it, the first one that the script raised.

    A library may handle an exception of its own while it waits. An iterator that has ended is no error.

    Args:
        stack: That of the thread, or of the exception that was raised meanwhile.
    """
    files = {file for file, _, _ in frames_of_script(stack)}
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        raised_at = stack_of_error(error.__traceback__)
        of_script = any(is_script(file) or file in files for file, _, _ in raised_at)
        if of_script and not isinstance(error, _ENDS) and not _lost_peer(error):
            return error
        error = _behind(error)
    return None


def _kinds(error: BaseException) -> tuple[str, ...]:
    return tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__)


def _message(error: BaseException) -> str:
    try:
        # Its text has the tracebacks of all ranks that failed, and begins with none of their errors.
        failures = getattr(error, "failures", {}) if _kinds(error)[0] == _CHECKPOINT_ERROR else {}
        of_ranks = [f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in failures.items()]
        return "\n".join([*of_ranks, str(error)])
    except Exception as broken:
        return f"<its text raised {type(broken).__name__}>"


def _module(error: BaseException) -> str:
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__", "")) if frames else ""


def _lost_peer(error: BaseException | None) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        kinds = _kinds(error)
        if not _LOST_PEER_TYPES.isdisjoint(kinds):
            return True
        if kinds[0] == "builtins.RuntimeError":
            module, message = _module(error), _message(error)
            is_collective = module.startswith(_COLLECTIVES)
            find = _GROUP_ERROR.search if is_collective else _GROUP_ERROR.match
            is_of_rpc = module.startswith(_RPC) and _RPC_ERROR.match(message)
            if is_of_rpc or find(message):
                return True
        if _OWN_ERRORS in kinds:
            # Such as a CollectiveTimeout from a DistError: it says itself what happened.
            return False
        error = _behind(error)
    return False


def _causes(error: BaseException) -> str:
    seen = [error]
    while (cause := seen[-1].__cause__) is not None and all(cause is not each for each in seen):
        seen.append(cause)
    return "\n".join(f"{type(each).__name__}: {_message(each)}" for each in seen[:0:-1])


def _behind(error: BaseException) -> BaseException | None:
    """The exception that a traceback shows above this one."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """What became of one rank.

    Args:
        time: When the error was raised, otherwise when the rank ended, in seconds since the epoch.
        returncode: As in subprocess: negative for a signal; None while it runs.
        exit_place: Where the script called sys.exit(); None if it did not.
        interrupted_at: Where the script was at a KeyboardInterrupt; empty without one.
        crashed_at: Where the script was at a signal that a crash of native code raised; empty if unknown.
        stopped: The launcher stopped it, so its end is not a failure.
        hung: The launcher stopped it because it blocked the others.
        suspended: The launcher killed it because SIGSTOP had stopped it for a second.
        step: The training step in which it failed; 0 if unknown.
        abort_message: What native code wrote when it aborted; empty if nothing.
        elsewhere: The launcher of another node reported this.
    """

    rank: int
    host: str
    pid: int
    time: float
    returncode: int | None
    error: Error | None = None
    exit_place: str | None = None
    interrupted_at: str = ""
    crashed_at: str = ""
    stopped: bool = False
    hung: bool = False
    suspended: bool = False
    step: int = 0
    abort_message: str = ""
    elsewhere: bool = False

    @property
    def failed(self) -> bool:
        """Whether the rank failed by itself."""
        ended_badly = self.error is not None or self.returncode not in (None, 0, ExitCode.PREEMPTED)
        return self.hung or (not self.stopped and ended_badly)

    @property
    def follows(self) -> bool:
        """Whether the rank failed because it lost a peer."""
        return self.error is not None and self.error.lost_peer and not self.hung

    @property
    def ended_early(self) -> bool:
        """Whether the rank ended by itself and did not fail: with exit code 0, or preempted."""
        ended_well = self.returncode in (0, ExitCode.PREEMPTED)
        return not self.stopped and self.error is None and ended_well

    @property
    def place(self) -> str:
        """The line of the script where it ended; empty if unknown."""
        if self.error is not None:
            return self.error.place
        return self.exit_place or self.interrupted_at or self.crashed_at

    @property
    def how(self) -> str:
        """The failure in a few words, equal for ranks that failed in the same way."""
        if self.error is not None:
            return self.error.text
        if self.hung:
            return "blocked the other ranks" + (", as reported above" if not self.elsewhere else "")
        if self.suspended:
            return "stopped by SIGSTOP, and killed after 1 s"
        if self.interrupted_at:
            return "KeyboardInterrupt"
        if self.returncode is not None and self.returncode < 0:
            return f"killed by {signal_name(-self.returncode)}"
        if self.ended_early:
            return f"ended with exit code {self.returncode} while the others went on"
        return f"exit code {self.returncode}"


@dataclass(frozen=True)
class FirstFailure:
    """The first failure, and how the other ranks relate to it.

    Args:
        original: Why the job ended: a failure, or a rank that exited while the others needed it.
        ranks: All ranks that failed in the same way, including that of `original`.
        followers: Ranks that failed because they lost a peer.
        others: Ranks that failed by themselves, later, and in another way.
        certain: False if every failed rank is a follower; `original` is then a guess.
        first_follower: The first follower; None if `certain`.
    """

    original: RankOutcome
    ranks: tuple[int, ...]
    followers: tuple[int, ...]
    others: tuple[RankOutcome, ...]
    certain: bool
    first_follower: RankOutcome | None = None

    def repeats(self, before: FirstFailure) -> bool:
        """Whether the failure before was the same one, in the same step of a training.

        The same is an exception of this type at this place, on any rank, or the same end of the same rank.
        """
        this, last = self.original, before.original
        if not this.step == last.step > 0:
            return False
        if this.error is not None and last.error is not None:
            return (this.error.type, this.error.place) == (last.error.type, last.error.place)
        return (this.rank, this.how) == (last.rank, last.how)

    @property
    def exit_code(self) -> int:
        """What `paceline run` exits with."""
        code, error = self.original.returncode, self.original.error
        if error is not None and (code is None or code < 0):
            return error.exit_code  # the launcher stopped it before it ended
        if not code or self.original.hung:
            return 1
        return 128 - code if code < 0 else code


def exit_code_of(error: BaseException) -> int:
    """The exit code of a rank that an exception ends."""
    # Compared by name, because most scripts do not import paceline.errors.
    ours = any(kind.__module__ == "paceline.errors" for kind in type(error).__mro__)
    return int(getattr(error, "exit_code", 1)) if ours else 1


def find_first_failure(outcomes: Iterable[RankOutcome]) -> FirstFailure | None:
    """Find the first failure of a round; None if no rank failed."""
    # Between hosts this order is only as good as their clocks; the message says so.
    in_time = sorted(outcomes, key=lambda each: each.time)
    failures = [each for each in in_time if each.failed]
    if not failures:
        return None
    causes = [each for each in failures if not each.follows]
    first = failures[0]
    lost: list[RankOutcome] = []  # the peers that the followers lost, if none of them failed
    if not causes:
        latest = first.time + _NOTICED_LATE_S
        # A time of the first one's host, so it is not applied to ranks of other hosts.
        lost = [
            each
            for each in in_time
            if each.ended_early and (each.host != first.host or each.time <= latest)
        ]
        if not lost:
            causes = [each for each in failures if each.error is not None and each.error.masked]
    original = (causes or lost or failures)[0]
    equal = lost or [each for each in failures if each.how == original.how]
    rest = [each for each in failures if each.how != original.how]
    return FirstFailure(
        original=original,
        ranks=tuple(sorted(each.rank for each in equal)),
        followers=tuple(sorted(each.rank for each in rest if each.follows)),
        others=tuple(each for each in rest if not each.follows),
        certain=bool(causes),
        first_follower=None if causes else failures[0],
    )
