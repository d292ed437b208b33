"""Which rank blocks the others, and why: rank states in, at most ten lines of text out. Pure.

`hang:` is an alarm: ranks wait for each other, or for a rank that has ended or is stopped, so they cannot go
on. `waiting:` is a notice: they wait for a rank that is in other code, such as a download, or for another
node or the network. From outside, such a rank is slow; nothing proves that it will not come.

The order of the decisions, if a rank has waited long enough in a collective:
1. The collective to report: one that a rank outside of any collective has not entered, if there is one.
2. Ranks called different collectives as the same number of the group: that is the cause.
3. A rank that the others waited for has just entered a collective: it is too early to say anything.
4. All absent ranks are in other collectives: two orders of groups, or one that ended on some ranks only.
5. Some absent ranks do not wait for ranks: why the first of them does not come (`_why_and_fix`).
6. No rank is absent: another node, a GPU or the network.
Without a collective, ranks in other calls of torch.distributed, such as `recv`, are those that wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import group_by_text, name_ranks
from paceline.watch.rank_state import FORKED_BESIDE, Call, RankState

_MAX_LINES = 10  # of a report
# Collectives whose tensors must have the same type and number of elements on all ranks.
_EQUAL_TENSORS = frozenset({"all_reduce", "allreduce", "broadcast", "reduce"})
# Calls by a `for` or a `with`: at its end too, the line is that of its head.
_AT_HEAD = ("paceline's steps", "paceline's leave")
_CHECK_NETWORK = "check that the ranks can reach each other on the job's network interface."
_MAY_TAKE_LONG = "nothing, if this may take so long; otherwise find what it waits for."
_SAME_ORDER = "call the same collectives, with the same tensors, in the same order on all ranks."


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """A diagnosis.

    Args:
        alarm: Whether the ranks cannot go on; otherwise they wait for a rank in other code.
        culprits: The ranks that the others wait for; all of them if that is unknown.
        text: At most ten lines.
        key: Equal for the same situation.
    """

    alarm: bool
    culprits: tuple[int, ...]
    text: str
    key: tuple[object, ...]


def diagnose(states: Sequence[RankState], world_size: int, after_s: float) -> Diagnosis | None:
    """The diagnosis; None if no rank has waited for `after_s` and nothing else is wrong."""
    states = sorted(states, key=lambda state: state.rank)
    alive = [state for state in states if state.returncode is None]
    in_collective = [
        (state, state.open_call.since_s)
        for state in alive
        if state.open_call is not None and not state.where.serves
    ]
    long_waiting = [state for state, since_s in in_collective if since_s >= after_s]
    if long_waiting:
        return _diagnose_collective(states, long_waiting, after_s)
    if in_collective or any(state.idle_s < after_s for state in alive):
        return None
    return _diagnose_without_collective(states, world_size)


def _diagnose_collective(
    states: Sequence[RankState], long_waiting: Sequence[RankState], after_s: float
) -> Diagnosis | None:
    call = _collective_to_report(states, long_waiting)
    differing = _differing(states, call)
    if differing:
        return _render_differing(states, differing)
    members = call.members or tuple(state.rank for state in states)
    of_group = [state for state in states if state.rank in members]
    entered = [s for s in of_group if s.in_unreported_collective or s.has_entered(call)]
    absent = [state for state in of_group if state not in entered]
    remote = sorted(set(members) - {state.rank for state in states})
    if _may_still_end(entered, absent, call, after_s):
        return None
    in_this_call = [state for state in long_waiting if _is_same(state.open_call, call)]
    lines = _waiter_lines(in_this_call)
    lines += _grouped(absent, lambda state: f"not entered it: {_activity(state)}", "has", "have")
    others = [state for state in long_waiting if state not in in_this_call and state not in absent]
    lines += _grouped(others, lambda state: f"in {_collective_text(state)}", "waits", "wait")
    if remote:
        lines.append(f"{name_ranks(remote)}: on other nodes, whose launchers have not answered")
    blockers = _blockers(states, absent)
    elsewhere = [state.open_call for state in absent if state.open_call is not None]
    extra = [] if blockers else _with_extra_call([in_this_call, absent])
    if extra:
        why, fix = _why_extra_call(extra)
    elif absent and len(elsewhere) == len(absent):
        if any(other.group_and_backend != call.group_and_backend for other in elsewhere):
            why = "two groups were entered in different orders, so each side waits for the other."
            fix = "use the groups in the same order on all ranks."
        else:
            why = "an earlier collective of this group has ended on some ranks only."
            fix = _CHECK_NETWORK
    elif blockers:
        why, fix = _why_and_fix(blockers, in_this_call)
    elif absent:
        why, fix = _why_and_fix(absent, in_this_call)
    elif remote:
        why, fix = "all ranks of this node have entered it; a rank on another node has not.", ""
    else:
        why = (
            "all ranks have entered it and it has not ended: a GPU computes what was issued before, its "
            "data are on the way, or the connection between the ranks is stuck."
        )
        fix = f"nothing, if this may take so long; otherwise {_CHECK_NETWORK}"
    alarm = bool(blockers or (absent and not remote))
    alarm = alarm and not any(state.may_come for state in blockers)
    # A notice is given once for a place in the script, an alarm once for a collective.
    key = (
        (call.group_and_backend, call.number)
        if alarm
        else (call.name, *(state.where.line for state in absent))
    )
    culprits = extra or blockers or absent or in_this_call
    return _diagnosis(states, alarm, culprits, lines, why, fix, key)


def _blockers(states: Sequence[RankState], absent: Sequence[RankState]) -> list[RankState]:
    """Of the absent ranks, and the ranks that these wait for in turn: those that do not wait for ranks."""
    found = list(absent)
    for state in found:
        if not state.waits_for_ranks:
            continue
        call = state.open_call
        if call is not None:
            others = _absent(states, call)
        else:
            others = [s for s in states if state.peer in (None, s.rank)]
        found += (other for other in others if other not in found)
    return [state for state in found if not state.waits_for_ranks]


def _with_extra_call(sides: Sequence[Sequence[RankState]]) -> Sequence[RankState]:
    """Of ranks that wait for each other in two calls, those in the call that the others did not make.

    Only for scripts that use Paceline: there the number of the step tells lines of a loop from those of its
    next pass. Empty if that is unknown.
    """
    if len(sides) != 2 or not all(sides):
        return []
    pairs = [(one, other) for one in sides[0] for other in sides[1]]
    if not any(state.step or state.where.in_paceline for pair in pairs for state in pair):
        return []
    differences = [_compare_progress(one, other) for one, other in pairs]
    if all(difference < 0 for difference in differences):
        return sides[0]
    return sides[1] if all(difference > 0 for difference in differences) else []


def _compare_progress(one: RankState, other: RankState) -> int:
    """Negative if `one` is at an earlier place of the script than `other`, positive if later; 0 if unknown.

    A function that Paceline calls, such as a score, is earlier than the rest of this call of Paceline.
    """
    usual = [s.where.gradients or s.where.torch_call in _AT_HEAD for s in (one, other)]
    if usual[0] != usual[1]:  # all ranks make these calls
        return 1 if usual[0] else -1
    if abs(one.step - other.step) == 1:
        return one.step - other.step
    pairs = zip(reversed(one.where.script), reversed(other.where.script), strict=False)
    for (file, line, function), (other_file, other_line, other_function) in pairs:
        if (file, function) != (other_file, other_function):
            return 0
        if line != other_line:
            return line - other_line
    return len(other.where.script) - len(one.where.script)


def _why_extra_call(extra: Sequence[RankState]) -> tuple[str, str]:
    who, call = name_ranks([state.rank for state in extra]), extra[0].open_call
    name = _torch_call_text(extra[0]) or (call.name if call is not None else "")
    verb = "makes" if len(extra) == 1 else "make"
    return (
        f"{who} {verb} a call that the others do not make, as under `if rank == 0:`: {name}"
        f"{_at(extra[0])}, or an earlier call of the same kind.",
        "call the same collectives on all ranks, whatever the branch.",
    )


def _absent(states: Sequence[RankState], call: Call) -> list[RankState]:
    """The ranks of its group that have not entered it."""
    return [
        state
        for state in states
        if (not call.members or state.rank in call.members) and not state.has_entered(call)
    ]


def _may_still_end(
    entered: Sequence[RankState], absent: Sequence[RankState], call: Call, after_s: float
) -> bool:
    """Whether a rank that the others waited for has itself entered a collective less than `after_s` ago.

    It is then too early to call this a hang.
    """
    if absent:
        calls = [state.open_call for state in absent if state.open_call is not None]
        return len(calls) == len(absent) and any(one.since_s < after_s for one in calls)
    times_s = [one.since_s for state in entered for one in state.calls if _is_same(one, call)]
    times_s += [state.idle_s for state in entered if state.in_unreported_collective]
    return any(since_s < after_s for since_s in times_s)


def _collective_to_report(states: Sequence[RankState], long_waiting: Sequence[RankState]) -> Call:
    """Preferably one that a rank outside of any collective has not entered."""

    def priority(call: Call) -> tuple[int, float]:
        absent = _absent(states, call)
        free = any(state.open_call is None for state in absent)
        return (0 if free else 1 if absent else 2, -call.since_s)

    calls = [state.open_call for state in long_waiting if state.open_call is not None]
    return min(calls, key=priority)


def _differing(states: Sequence[RankState], call: Call) -> dict[int, Call]:
    """The first collective of the group, up to `call`, that differs between ranks; by rank."""
    by_number: dict[int, dict[int, Call]] = defaultdict(dict)
    for state in states:
        for other in state.calls:
            if other.group_and_backend == call.group_and_backend and other.number <= call.number:
                by_number[other.number][state.rank] = other
    for number in sorted(by_number):
        calls = by_number[number].values()
        # If a collective ended although the tensors differ, this may be intended.
        kinds = {
            one.tensor_size for one in calls if one.name in _EQUAL_TENSORS and number == call.number
        }
        if len({one.name for one in calls}) > 1 or len(kinds) > 1:
            return by_number[number]
    return {}


def _render_differing(states: Sequence[RankState], calls: dict[int, Call]) -> Diagnosis:
    number = next(iter(calls.values())).number
    at = {state.rank: state for state in states if state.rank in calls}

    def text_of(state: RankState) -> str:
        call = calls[state.rank]
        return _call_text(call, state) + ("" if call.completed else _at(state))

    largest_first = sorted(
        group_by_text(at.values(), text_of).items(), key=lambda item: -len(item[1])
    )
    lines: list[str] = []
    for text, members in largest_first:
        first = members[0]
        if any(calls[state.rank].completed for state in members):
            now = f", now in {_collective_text(first)}" if first.open_call else ""
            did = f"called {text}{now}"
        elif lines:
            did = f"{'waits' if len(members) == 1 else 'wait'} in {text}"
        else:
            did = f"{_have(members)} waited {first.idle_s:.0f} s in {text}"
        lines.append(_with_ranks(members, did))
    fix = _SAME_ORDER
    names = {call.name for call in calls.values()}
    why = "the ranks called the same collective with different tensors."
    if len(names) > 1:
        why = f"the ranks called different collectives as number {number} of this group."
    stepping = [rank for rank in calls if at[rank].in_step]
    if 0 < len(stepping) < len(calls):
        takes = "takes" if len(stepping) == 1 else "take"
        why += f" Or {name_ranks(stepping)} {takes} more steps than the others: uneven batches."
    groups = [members for _, members in largest_first]
    culprits = _with_extra_call(groups)
    if culprits:
        why, fix = _why_extra_call(culprits)
    else:
        culprits = _differing_ranks(groups, calls)
    key = (number, *sorted(names))
    return _diagnosis(states, True, culprits, lines, why, fix, key)


def _differing_ranks(
    groups: Sequence[list[RankState]], calls: Mapping[int, Call]
) -> Sequence[RankState]:
    """Of groups of ranks that made different calls, largest first: the ranks that differ from the others.

    If two groups have the same size, one that is in a step makes only the calls of every step, so the other
    made an extra call; and a rank whose call has ended did not wait. If neither decides, all ranks.
    """
    smallest = [members for members in groups if len(members) == len(groups[-1])]
    for is_usual in (
        lambda state: state.in_step,
        lambda state: not calls[state.rank].completed,
    ):
        unusual = [members for members in smallest if not any(map(is_usual, members))]
        if 0 < len(unusual) < len(smallest):
            smallest = unusual
    if len(smallest) == 1:
        return smallest[0]
    return [state for members in groups for state in members]


def _diagnose_without_collective(states: Sequence[RankState], world_size: int) -> Diagnosis | None:
    """No rank is in a collective that the flight recorder knows."""
    alive = [state for state in states if state.returncode is None]
    waiting = [state for state in alive if state.waits_for_ranks]
    rest = [state for state in alive if state not in waiting]
    if not waiting:
        # Ranks that wait for no rank are in other code. They show up only if that is known to block.
        rest = [state for state in rest if state.where.loader or state.state == "T"]
        if not rest:
            return None
    elif any(state.where.serves for state in alive):
        return None  # a server without requests is idle, and so are those that wait for it
    extra: Sequence[RankState] = []
    lines = _grouped(
        waiting,
        lambda state: f"waited {state.idle_s:.0f} s in {_torch_call_text(state)}{_at(state)}",
        "has",
        "have",
    )
    if not waiting:
        lines.append(f"no rank has entered a collective for {min(s.idle_s for s in alive):.0f} s")
    ended = [state for state in states if state.returncode is not None]
    activities = group_by_text([*rest, *ended], _activity)
    lines += [_with_ranks(members, text, ": ") for text, members in activities.items()]
    if rest:
        why, fix = _why_and_fix(rest, waiting)
    elif ended:
        why, fix = _why_and_fix(ended, waiting)
    elif world_size == 1:
        why = "the job has one rank, and it waits for processes that this launcher did not start."
        fix = (
            "start them too; or leave rank, world_size and init_method out of the call, and choose the "
            "number of ranks with --nproc-per-node."
        )
    elif world_size > len(states):
        why = "all ranks of this node wait; a rank on another node may not have arrived."
        fix = "look at the launchers of the other nodes. " + _CHECK_NETWORK.capitalize()
    elif all(state.where.torch_call == waiting[0].where.torch_call for state in waiting):
        why = f"all ranks are in {waiting[0].where.torch_call}, and none gets an answer."
        fix = "check that they name the same peers and can reach each other."
    elif extra := _with_extra_call(list(group_by_text(waiting, _torch_call_text).values())):
        why, fix = _why_extra_call(extra)
    else:
        why, fix = "the ranks wait for each other in different calls.", _SAME_ORDER
    # A job of one rank, or of one node, may wait for processes that this launcher does not know.
    alarm = not any(state.may_come for state in rest) and world_size == len(states) > 1
    alarm = alarm and not any(_exchange(one, other) for one in waiting for other in waiting)
    culprits = rest or ended or extra or waiting
    key = ("others", *(state.where.line for state in alive))
    return _diagnosis(states, alarm, culprits, lines, why, fix, key)


def _optimizer_steps(states: Sequence[RankState]) -> list[str]:
    """A line about how many optimizer steps the ranks have made; none if none has made any."""
    known = [state for state in states if state.answered and state.returncode is None]
    groups = group_by_text(known, lambda state: f"{state.optimizer_steps} times by ")
    made = [text + name_ranks(state.rank for state in each) for text, each in groups.items()]
    has_any = any(state.optimizer_steps for state in known)
    return [f"optimizer.step() was called {', '.join(made)}"] if has_any else []


def _exchange(one: RankState, other: RankState) -> bool:
    """Whether one sends to the other, which receives: the data may be on their way."""
    calls = (one.where.torch_call, other.where.torch_call)
    return calls == ("send", "recv") and (one.peer, other.peer) == (other.rank, one.rank)


def _waiter_lines(waiters: Sequence[RankState]) -> list[str]:
    lines = []
    for text, members in group_by_text(waiters, _collective_text).items():
        seconds = min(s.open_call.since_s for s in members if s.open_call is not None)
        step = f", in step {members[0].step}" if members[0].step else ""
        lines.append(
            _with_ranks(members, f"{_have(members)} waited {seconds:.0f} s in {text}{step}")
        )
    return lines


def _collective_text(state: RankState) -> str:
    assert state.open_call is not None
    return f"{_call_text(state.open_call, state)}{_at(state)}"


def _torch_call_text(state: RankState) -> str:
    name = state.where.torch_call
    if state.where.in_paceline and state.call:
        name = state.call  # as the script writes it, such as `training.save`
    return name + (f" with rank {state.peer}" if state.peer is not None else "")


def _call_text(call: Call, state: RankState) -> str:
    notes = [call.tensor_text] if call.tensor_text else []
    if state.where.gradients and not call.completed:
        notes.insert(0, "gradients")
    if call.members and len(call.members) > 1 and call.group != "0":
        axis = f" on axis {call.axis}" if call.axis else ""
        notes.append(f"group of {name_ranks(call.members)}{axis}")
    within = state.where.in_paceline and not call.completed
    return (
        f"{_call_name(call, state)} #{call.number}"
        + (f" ({', '.join(notes)})" if notes else "")
        + (f" of {_torch_call_text(state)}" if within else "")
    )


def _call_name(call: Call, state: RankState) -> str:
    # Gloo runs a reduce_scatter as an all_reduce, and records that. The stack has the function, unless the
    # script waits for a work that it began before.
    if (call.name, call.backend, call.completed) != ("all_reduce", "gloo", False):
        return call.name
    if state.where.reduce_scatter or "reduce_scatter" in state.call:
        return "reduce_scatter"
    is_later = state.call.rpartition(".")[2] in ("wait", "wait_tensor")
    return "all_reduce or reduce_scatter" if is_later else call.name


def _is_same(call: Call | None, other: Call) -> bool:
    return call is not None and (call.group_and_backend, call.number) == (
        other.group_and_backend,
        other.number,
    )


def _at(state: RankState) -> str:
    return f" at {state.where.line}" if state.where.script else ""


def _activity(state: RankState) -> str:
    """What a rank does that the others wait for."""
    if state.returncode is not None:
        return f"ended with exit code {state.returncode}"
    if state.state in ("T", "t"):
        return f"stopped (state {state.state}){_at(state)}"
    if state.state == "D":
        kernel = f", {state.kernel_function}" if state.kernel_function else ""
        return f"in an uninterruptible wait in the kernel (state D{kernel}){_at(state)}"
    if state.state == "Z":
        return "its main thread has ended, and other threads run on (state Z)"
    if state.open_call is not None:
        return f"in {_collective_text(state)}"
    text = state.where.function_at_line
    text = text or ("not in the script" if state.answered else "it does not report where")
    called = _torch_call_text(state) if state.where.torch_call else state.call
    text += f", in {called}" if called else ""
    if state.where.loader:
        text += f", waiting for a loader worker{_workers(state)}"
    if state.holds_gil:
        text += ", holding the GIL"
    return text


def _workers(state: RankState) -> str:
    return f": {'; '.join(state.workers[:2])}" if state.workers else ", but none was found"


def _why_and_fix(absent: Sequence[RankState], waiters: Sequence[RankState]) -> tuple[str, str]:
    """Why these ranks have not arrived, and what to do."""
    # A process that has ended or is held explains more than a line of the script.
    first = min(absent, key=lambda s: (s.returncode is None, s.state not in ("T", "t", "D", "Z")))
    who = f"rank {first.rank}"
    if first.returncode is not None:
        return (
            f"{who} finished while the others still run.",
            "make all ranks take the same number of steps.",
        )
    if first.state == "T":
        return (
            f"SIGSTOP or a shell's job control has stopped the process of {who}.",
            f"resume it with `kill -CONT {first.pid}`.",
        )
    if first.state == "t":
        return (
            f"a debugger holds the process of {who}.",
            "continue it in the debugger, or detach the debugger.",
        )
    if first.state == "D":
        return (
            f"{who} waits for a disk, a network file system or another device.",
            "nothing, if this may take so long; otherwise check the device.",
        )
    if first.state == "Z":
        return (
            f"the main thread of {who} has ended, but another thread still runs.",
            "end or join the threads that the script starts.",
        )
    if first.where.loader and any(FORKED_BESIDE in text for text in first.workers):
        return (
            f"the DataLoader of {who} gets no batch from its workers. A process has after its fork only the "
            "thread that forked it: a lock that another thread held is never released there.",
            "start the workers before that thread, or with multiprocessing_context='forkserver'.",
        )
    if first.where.loader:
        return (
            f"the DataLoader of {who} gets no batch from its workers.",
            "nothing, if a batch may take so long; otherwise check the dataset's code there. "
            "DataLoader(timeout=...) makes it an error.",
        )
    if first.where.lock:
        return (
            f"{who} waits for a lock, a queue or a process.",
            "nothing, if this may take so long; otherwise find what should release or fill it.",
        )
    if first.holds_gil:
        return (
            f"native code of {who} holds the GIL, so no other Python thread runs.",
            _MAY_TAKE_LONG,
        )
    if first.waits_for_ranks:
        return "the ranks wait for each other in different calls.", _SAME_ORDER
    return _diverging_line(first, waiters)


def _diverging_line(absent: RankState, waiters: Sequence[RankState]) -> tuple[str, str]:
    """Where the stacks of the ranks diverge. Stacks alone do not tell a branch from a call that blocks."""
    who = f"rank {absent.rank}"
    if not waiters:
        return f"{who} is in other code.", _MAY_TAKE_LONG
    pairs = zip(reversed(absent.where.script), reversed(waiters[0].where.script), strict=False)
    for (file, line, function), (other_file, other_line, other) in pairs:
        if (file, function) != (other_file, other):
            break
        if line != other_line:
            return (
                f"{who} is at {file}:{line} while the others are at {file}:{other_line}: that call takes "
                f"long or does not return, or only {who} makes it, as under `if rank == 0:`.",
                f"{_MAY_TAKE_LONG[:-1]}. If only {who} makes it, call the same collectives on all ranks, "
                "whatever the branch.",
            )
    return f"{who} has not come back from there, and the others wait for it.", _MAY_TAKE_LONG


def _grouped(
    states: Sequence[RankState], text_of: Callable[[RankState], str], one: str, many: str
) -> list[str]:
    lines = []
    for text, members in group_by_text(states, text_of).items():
        verb = one if len(members) == 1 else many
        lines.append(_with_ranks(members, f"{verb} {text}"))
    return lines


def _have(members: Sequence[RankState]) -> str:
    return "has" if len(members) == 1 else "have"


def _with_ranks(members: Sequence[RankState], text: str, separator: str = " ") -> str:
    who = name_ranks([state.rank for state in members])
    if len(members) == 1:
        stage = "" if members[0].stage is None else f", stage {members[0].stage}"
        who += f" (host {members[0].host}, pid {members[0].pid}{stage})"
    return f"{who}{separator}{text}"


def _diagnosis(
    states: Sequence[RankState],
    alarm: bool,
    culprits: Sequence[RankState],
    lines: list[str],
    why: str,
    fix: str,
    key: tuple[object, ...],
) -> Diagnosis:
    lines = [*lines, *_optimizer_steps(states)]
    # The same error on all ranks, such as a failed import that the script expects, does not divide them.
    common = set.intersection(*(set(state.raised.splitlines()) for state in states))
    own = {s.rank: [e for e in s.raised.splitlines() if e not in common] for s in states}
    raised = [state for state in states if own[state.rank]]
    for text, members in group_by_text(raised, lambda state: own[state.rank][0]).items():
        lines.insert(
            1, _with_ranks(members, f"raised {text}, and still runs a `finally` or `except` block")
        )
    waiting = [state for state in raised if state.waits_for_ranks]
    if waiting:
        culprits = waiting
        who = name_ranks([state.rank for state in waiting])
        why = (
            f"{who} raised an error, and then waited for the other ranks in a `finally`, `except` or `with` "
            "block. The error is the cause."
        )
        fix = "correct the error. Such a block must not wait for ranks: those without the error never come."
    return Diagnosis(
        alarm=alarm,
        culprits=tuple(state.rank for state in culprits),
        text=_render("hang" if alarm else "waiting", lines, why, fix),
        key=(alarm, *key),
    )


def _render(word: str, lines: Sequence[str], why: str, fix: str) -> str:
    """At most 10 lines; those that do not fit are counted."""
    left = _MAX_LINES - bool(why) - bool(fix)
    if len(lines) > left:
        lines = [*lines[: left - 1], f"... and {len(lines) - left + 1} more"]
    text = [f"{word}: {lines[0]}", *(" " * (len(word) + 2) + line for line in lines[1:])]
    text += [f"why:  {why}"] if why else []
    text += [f"fix:  {fix}"] if fix else []
    return "\n".join(text) + "\n"
