"""The words of the launcher: what was chosen, what failed, what happens next. Text.

Shapes errors by `errors.py`: what, where, why, fix. It judges nothing; see verdict.py. What is generally
known of an error comes from the table of `paceline explain`, with what this host says to it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paceline.errors import LaunchFailed, name_ranks
from paceline.explain.facts import facts
from paceline.explain.reading import Found, recognise
from paceline.machine import Memory, format_bytes
from paceline.watch.crash import Fact, FirstFailure


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large the job is, for messages.

    Args:
        restarts: How many there were.
        nodes: This one, and those that have not told what became of their ranks.
        memory: What the kernel counted before and after.
        calls: The collective that each rank entered last, where it told.
        again: Whether the same exception came in the same step of the round before.
    """

    world_size: int
    restarts: int
    max_restarts: int
    nodes: int = 1
    memory: tuple[Memory, Memory] = (Memory(), Memory())
    calls: Mapping[int, str] = field(default_factory=dict)
    again: bool = False


def render_failure(verdict: FirstFailure, shape: Shape) -> str:
    """The end of a job: the original traceback, then the summary."""
    original = verdict.original
    lines: list[str] = []
    # A rank that left has none; that of a follower shows where it was missed, and may say more.
    told = verdict.first_follower or original
    if told.error is not None and not told.error.shown and not told.elsewhere:
        lines += _prefixed(told.error.traceback, told.rank, shape.world_size)
    who = name_ranks(verdict.alike)
    known = _known(told)
    failure = LaunchFailed(
        f"{who} {original.how}"
        if original.left
        else f"{who} of {shape.world_size} failed: {original.how}",
        where=_where(original, several=len(verdict.alike) > 1),
        why=_why(verdict, shape, known),
        fix=_fix(original, shape, known),
    )
    lines += f"paceline: {failure}".splitlines()
    if verdict.followers:
        they = "it lost its peer" if len(verdict.followers) == 1 else "they lost their peer"
        lines.append(f"  {name_ranks(verdict.followers)} only followed: {they}.")
    for text, ranks in _merged((fact.rank, _later(verdict, fact)) for fact in verdict.others):
        lines.append(f"  {name_ranks(ranks)} failed {text}.")
    if original.gave_up and (called := _merged(shape.calls.items())):
        last = "; ".join(f"{name_ranks(ranks)} {text}" for text, ranks in called)
        lines.append(f"  called last: {last}.")
    if shape.again:
        lines.append(
            f"  The same exception came in step {original.step} before the restart: another would "
            "not help."
        )
    elif shape.restarts:
        lines.append(f"  This was after {shape.restarts} of {shape.max_restarts} restarts.")
    return "\n".join(lines) + "\n"


def _later(verdict: FirstFailure, fact: Fact) -> str:
    if verdict.tells_apart(fact):
        return f"later: {fact.how}"
    return f"at the same time, as far as the clocks of two hosts can tell: {fact.how}"


def render_restart(verdict: FirstFailure, shape: Shape) -> str:
    """One line: who failed how, and that the ranks begin again."""
    original = verdict.original
    place = original.error.place if original.error is not None else original.exit_place
    return (
        f"paceline: {name_ranks(verdict.alike)} {'' if original.left else 'failed: '}{original.how}"
        f"{f' at {place}' if place else ''} (host {original.host}, pid {original.pid}); "
        f"restart {shape.restarts + 1} of {shape.max_restarts} begins\n"
    )


def _prefixed(text: str, rank: int, world_size: int) -> list[str]:
    prefix = f"[{rank}] " if world_size > 1 else ""
    return [prefix + line for line in text.rstrip("\n").splitlines()]


def _where(fact: Fact, *, several: bool) -> str:
    parts = [f"first on rank {fact.rank}"] if several else [f"rank {fact.rank}"]
    parts += [f"{'another node, ' * fact.elsewhere}host {fact.host}", f"pid {fact.pid}"]
    if fact.error is not None and fact.returncode is not None and fact.returncode > 0:
        parts.append(f"exit code {fact.returncode}")
    place = fact.error.place if fact.error is not None else fact.exit_place
    return ", ".join([*parts, place] if place else parts)


def _known(fact: Fact) -> Found | None:
    """What the table knows of an error or a signal; errors of Paceline explain themselves."""
    error = fact.error
    if error is not None and "paceline.errors.PacelineError" in error.kinds:
        return None
    text = fact.how if error is None else f"{error.type}: {error.message}"
    # Why it gave up says more than that it did.
    found = recognise(fact.gave_up) or recognise(text)
    # Who only followed was judged by where its error was raised, and a victim's text says no more.
    return None if found is None or found.cause.kind == "victim" else found


def _why(verdict: FirstFailure, shape: Shape, known: Found | None) -> str:
    fact = verdict.original
    if fact.hung:
        return ""
    if fact.left:
        elsewhere = "; or the cause is on another host" if shape.nodes > 1 else ""
        return (
            "it came to its end, or called sys.exit(0) or os._exit(0), before the others were done"
            f"{elsewhere}."
        )
    if fact.elsewhere:
        return ""
    if (counted := _counted(fact, shape)) or fact.frozen_s:
        return (
            counted or "something outside the job sent SIGSTOP, and the other ranks waited for it."
        )
    if known is not None:
        return f"{known.cause.why} {facts(known.cause.facts, known.text)}".rstrip()
    if not verdict.certain and shape.nodes > 1:
        return (
            "it lost a peer, and no rank of this host failed by itself: the cause is on another "
            "host, or the connection between them."
        )
    if not verdict.certain:
        return (
            "it failed where ranks wait for each other, and no rank failed elsewhere: the error "
            "above is the cause, or the connection between ranks broke."
        )
    if fact.error is not None and fact.exit_place is not None:
        return f"the script caught the error and called sys.exit() at {fact.exit_place}."
    if fact.error is not None or (fact.returncode is not None and fact.returncode < 0):
        return ""
    if fact.exit_place is not None:
        return "the script called sys.exit()."
    return "the process ended itself, by os._exit() or from native code; there was no exception."


def _counted(fact: Fact, shape: Shape) -> str:
    """What the kernel's counters say to a killed rank; empty where they say nothing."""
    before, after = shape.memory
    killed = after.killed_since(before)
    if killed and (fact.error is not None or fact.returncode == -signal.SIGKILL):
        whom = "a process of this job" if fact.error is not None else "it"
        return f"the kernel killed {whom} for memory: {killed}."
    if fact.error is not None or fact.frozen_s:
        return ""
    if fact.returncode == -signal.SIGKILL and after.kills is not None:
        return (
            "something outside the job sent SIGKILL; not the kernel for memory, whose count stands."
        )
    if fact.returncode == -signal.SIGBUS and after.shm_bytes:
        free = f"{format_bytes(after.shm_bytes)}, {format_bytes(after.shm_free_bytes)} free now"
        return f"native code met memory that could not be had; /dev/shm has {free}."
    return ""


def _fix(fact: Fact, shape: Shape, known: Found | None) -> str:
    if fact.hung or fact.frozen_s:
        return ""
    if fact.left:
        return "let all ranks do as many steps and end together."
    if fact.elsewhere:
        return f"see what the launcher on host {fact.host} says of it."
    before, after = shape.memory
    if fact.returncode == -signal.SIGKILL and after.kills is not None:
        if after.killed_since(before):
            return "lower the micro-batch or the loader's workers, or raise the limit."
        return "look who sent it: a scheduler's limit of time or memory, or a person."
    return known.cause.fix if known is not None else ""


def _merged(texts: Iterable[tuple[int, str]]) -> list[tuple[str, list[int]]]:
    groups: dict[str, list[int]] = {}
    for rank, text in texts:
        groups.setdefault(text, []).append(rank)
    return [(text, sorted(ranks)) for text, ranks in groups.items() if text]
