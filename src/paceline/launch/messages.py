"""The text of messages about failures, made from what `watch.crash` found.

They have the form of `errors.py`: what, where, why, fix. The causes of known errors come from the table of
`paceline explain`, with the owner of a port.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.errors import LaunchFailed, group_by_text, name_ranks
from paceline.exit_codes import ExitCode
from paceline.explain.facts import port_owner
from paceline.explain.reading import Found, recognise
from paceline.machine import Memory, format_bytes
from paceline.watch.crash import FirstFailure, RankOutcome

# Known errors of a rank whose loader worker or other child may have been killed for memory.
_LOST_PROCESS = ("host-out-of-memory", "loader-worker-killed", "loader-worker-died")


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """Facts about the job, for messages.

    Args:
        restarts: The number of restarts so far.
        silent_nodes: The number of other nodes that did not report how their ranks ended.
        memory: The kernel's counters at the start of the round and now.
        calls: The collective that each rank entered last, as far as known.
        repeated: Whether the failure before was the same one in the same step.
    """

    world_size: int
    restarts: int
    max_restarts: int
    silent_nodes: int = 0
    memory: tuple[Memory, Memory] = (Memory(), Memory())
    calls: Mapping[int, str] = field(default_factory=dict)
    repeated: bool = False


def render_failure(first: FirstFailure, info: JobInfo) -> str:
    """What is printed at the end of a failed job: the original traceback, then the summary."""
    original = first.original
    lines: list[str] = []
    # If the cause is a rank that ended with 0, print the error of the first rank that missed it.
    shown = first.first_follower or original
    known = _known_cause(shown)
    if shown.elsewhere:
        # Its own launcher prints that traceback. Print the first failure of this host: it may have been
        # earlier, since clocks of hosts are not compared.
        shown = next((each for each in first.others if not each.elsewhere), shown)
    if shown.error is not None and not shown.error.shown and not shown.elsewhere:
        prefix = f"[{shown.rank}] " if info.world_size > 1 else ""
        lines += [prefix + line for line in shown.error.traceback.rstrip("\n").splitlines()]
    ranks = name_ranks(first.ranks)
    failure = LaunchFailed(
        f"{ranks} {original.how}"
        if original.ended_early
        else f"{ranks} of {info.world_size} failed: {_how(first, info)}",
        where=_where(original, several=len(first.ranks) > 1),
        why=_why(first, info, known),
        fix=_fix(original, info, known),
    )
    lines += f"paceline: {failure}".splitlines()
    if first.followers:
        reason = "it lost its peer" if len(first.followers) == 1 else "they lost their peer"
        lines.append(f"  {name_ranks(first.followers)} failed as a consequence: {reason}.")
    for text, outcomes in group_by_text(first.others, lambda each: _later(first, each)).items():
        lines.append(f"  {name_ranks(outcome.rank for outcome in outcomes)} failed {text}.")
    known_calls = [rank for rank, call in info.calls.items() if call]
    if original.returncode == -signal.SIGABRT and known_calls:
        called = group_by_text(known_calls, lambda rank: info.calls[rank]).items()
        last = "; ".join(f"{name_ranks(ranks)} {call}" for call, ranks in called)
        lines.append(f"  called last: {last}.")
    if info.repeated:
        lines.append(
            f"  The same happened in step {original.step} before the restart: another restart would not help."
        )
    elif info.restarts:
        lines.append(f"  This was after {info.restarts} of {info.max_restarts} restarts.")
    return "\n".join(lines) + "\n"


def _how(first: FirstFailure, info: JobInfo) -> str:
    original = first.original
    # If all have hung, none of them is known as the cause.
    if original.hung and original.error is None and len(first.ranks) == info.world_size > 1:
        return "waited for each other, as reported above"
    return original.how


def _later(first: FirstFailure, outcome: RankOutcome) -> str:
    if outcome.host == first.original.host:
        return f"later: {outcome.how}"
    return f"too, perhaps earlier (the clocks of the hosts are not compared): {outcome.how}"


def render_restart(first: FirstFailure, info: JobInfo) -> str:
    """One line: which rank failed and how, and that the ranks start again."""
    original = first.original
    failed = "" if original.ended_early else "failed: "
    return (
        f"paceline: {name_ranks(first.ranks)} {failed}{_how(first, info)}"
        f"{f' at {original.place}' if original.place else ''} (host {original.host}, pid {original.pid}); "
        f"restart {info.restarts + 1} of {info.max_restarts} begins\n"
    )


def _where(outcome: RankOutcome, *, several: bool) -> str:
    parts = [f"first on rank {outcome.rank}"] if several else [f"rank {outcome.rank}"]
    parts += [
        f"{'another node, ' if outcome.elsewhere else ''}host {outcome.host}",
        f"pid {outcome.pid}",
    ]
    if outcome.error is not None and outcome.returncode is not None and outcome.returncode > 0:
        parts.append(f"exit code {outcome.returncode}")
    return ", ".join([*parts, outcome.place] if outcome.place else parts)


def _known_cause(outcome: RankOutcome) -> Found | None:
    """The entry of `paceline explain` for an error or a signal; None for errors of Paceline itself."""
    error = outcome.error
    if error is not None and "paceline.errors.PacelineError" in error.kinds:
        return None
    # What an error was raised from says more than the error, if the table knows both.
    text = outcome.how if error is None else f"{error.causes}\n{error.type}: {error.message}"
    # The text that native code wrote when it aborted says more than the signal.
    found = recognise(outcome.abort_message) or recognise(text)
    # An entry about a lost peer ("follower") adds nothing: the summary names the followers already.
    return None if found is None or found.cause.kind == "follower" else found


def _why(first: FirstFailure, info: JobInfo, known: Found | None) -> str:
    outcome = first.original
    if outcome.hung and outcome.error is None:
        return ""
    if outcome.ended_early:
        elsewhere = "; or the cause is on another host" if info.silent_nodes else ""
        why = (
            "it reached its end, or called sys.exit(0) or os._exit(0), before the others were done"
        )
        if outcome.returncode == ExitCode.PREEMPTED:
            why = "it was preempted, and the others were not"
        return f"{why}{elsewhere}."
    if outcome.elsewhere:
        return ""
    if cause := _cause_by_counters(outcome, info, known):
        return cause
    if outcome.suspended:
        return "something outside the job sent SIGSTOP, and the other ranks waited for it."
    if known is not None:
        error = outcome.error
        said = f"{known.text.rstrip('.')}: " if error and known.text in error.causes else ""
        now = port_owner(known.text) if known.cause.port else ""
        return f"{said}{known.cause.why} {now}".rstrip()
    if not first.certain and info.silent_nodes:
        return (
            "it lost a peer, and no rank of this host failed by itself: the cause is on another "
            "host, or the connection between the hosts broke."
        )
    if not first.certain and info.world_size > 1:
        return (
            "it failed where ranks wait for each other, and no rank failed elsewhere: the error "
            "above is the cause, or the connection between ranks broke."
        )
    if outcome.error is not None and outcome.exit_place is not None:
        return f"the script caught the error and called sys.exit() at {outcome.exit_place}."
    if outcome.error is None and outcome.interrupted_at:
        return "the script raised it, or something sent SIGINT to this process alone."
    if outcome.error is not None or (outcome.returncode is not None and outcome.returncode < 0):
        return ""
    if outcome.exit_place is not None:
        return "the script called sys.exit()."
    return "the process ended itself, by os._exit() or from native code; there was no exception."


def _cause_by_counters(outcome: RankOutcome, info: JobInfo, known: Found | None) -> str:
    before, after = info.memory
    killed = after.killed_since(before)
    # Other errors have nothing to do with a process that was killed in the meantime.
    lost_process = known is not None and known.cause.name in _LOST_PROCESS
    if killed and outcome.error is not None and lost_process:
        return f"the kernel killed a process of this job for memory: {killed}."
    if killed and outcome.returncode == -signal.SIGKILL:
        return f"the kernel killed it for memory: {killed}."
    if outcome.error is not None or outcome.suspended:
        return ""
    if outcome.returncode == -signal.SIGKILL and after.kills is not None:
        why = "It was not the kernel: its count of out-of-memory kills did not change."
        return f"a process sent SIGKILL. {why}"
    if outcome.returncode == -signal.SIGBUS and after.shm_bytes:
        free = f"{format_bytes(after.shm_bytes)}, {format_bytes(after.shm_free_bytes)} free now"
        return f"native code used memory that the system could not provide; /dev/shm has {free}."
    return ""


def _fix(outcome: RankOutcome, info: JobInfo, known: Found | None) -> str:
    if (outcome.hung and outcome.error is None) or outcome.suspended:
        return ""
    if outcome.ended_early and outcome.returncode == ExitCode.PREEMPTED:
        return "let all ranks stop after the same step, as those of a `Training` do."
    if outcome.ended_early:
        return "let all ranks do the same number of steps and end together."
    if outcome.elsewhere:
        return f"see the output of the launcher on host {outcome.host}."
    before, after = info.memory
    if outcome.returncode == -signal.SIGKILL and after.kills is not None:
        if after.killed_since(before):
            return "lower the micro-batch or the number of loader workers, or raise the limit."
        return (
            "start the same command again: a training with checkpoints goes on from the last one. Possible "
            "senders: a time or memory limit of the scheduler, or a person."
        )
    return known.cause.fix if known is not None else ""
