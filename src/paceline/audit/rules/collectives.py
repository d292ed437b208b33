"""Collectives that some ranks enter and others do not."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.audit.events import (
    BackwardBegun,
    BackwardEnded,
    CollectiveBegun,
    CollectiveEnded,
    DDPBuilt,
    EndedByVerify,
    Event,
    Failed,
    ForwardBegun,
    ForwardEnded,
    LoaderSeen,
    PassBegun,
)
from paceline.audit.evidence import Call, RankLog, op_of
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault, NotJudged
from paceline.errors import name_ranks


def unmatched_collective(case: Case) -> Judgement:
    """Compare the sequences of collectives of all ranks."""
    if case.updates_differ:
        return NotJudged(
            "the ranks take different steps, so they were not ended after the same one."
        )
    cut = any(log.first(EndedByVerify) for log in case.ranks)
    steps = case.ordinary.plan.steps if cut else math.inf
    sequences = [sequence_of(log, case.world_size, steps) for log in case.ranks]
    for number in range(max(map(len, sequences))):
        calls = [sequence[number] if number < len(sequence) else None for sequence in sequences]
        kinds = [None if call is None else _kind(call) for call in calls]
        if len(set(kinds)) == 1:
            continue
        absent = [log for log, call in zip(case.ranks, calls, strict=True) if call is None]
        if any(log.ended_in_step for log in absent):
            return NoFault(f"up to the last step, all ranks entered the same {number} collectives.")
        if case.ordinary.hung and any(_is_busy(log) for log in absent):
            return NotJudged("a rank was still computing when the run was stopped.")
        failed = [log for log in case.ranks if log.first(Failed)]
        if absent and failed and not all(_failed_in_collective(log) for log in failed):
            return NotJudged("the script failed before its end.")
        # Earlier calls at different lines: the extra call was paired with another call of its kind.
        while number and len({sequence[number - 1].at for sequence in sequences}) > 1:
            number -= 1
        return _fault(case, sequences, number)
    for calls_of_all in zip(*sequences, strict=True):
        lines = {call.at for call in calls_of_all}
        if len(lines) > 1 and op_of(calls_of_all[0]) == "all_reduce":
            return _at_several_lines(calls_of_all, sorted(lines))
    return NoFault(f"all ranks entered the same {len(sequences[0])} collectives in the same order.")


def _at_several_lines(calls: Sequence[Call], lines: list[str]) -> Finding:
    ranks = [rank for rank, call in enumerate(calls) if call.at != calls[0].at]
    where = ", ".join(f"rank {rank} at {call.at}" for rank, call in enumerate(calls))
    return Finding(
        what=f"the ranks entered one all_reduce at different lines: {' and '.join(lines)}.",
        at=calls[ranks[0]].at,
        ranks=ranks,
        step=calls[0].steps_done + 1,
        why="all_reduce adds what the ranks pass to it. If these lines pass different quantities, the sum is "
        "of both.",
        fix="call it at one line, or check that each of these lines passes the same quantity.",
        evidence=where,
        effect=f"one sum of {len(lines)} lines",
        is_note=True,
    )


def sequence_of(log: RankLog, world_size: int, steps: float = math.inf) -> list[Call]:
    """The collectives over all ranks that this rank entered, including those of DDP.

    Only those before the first pass after so many steps: verification may end the rank in such a pass.
    """
    found: list[Call] = []
    spans_all = all(event.group_size == world_size for event in log.of(DDPBuilt))
    for event in log.events:
        if isinstance(event, PassBegun):
            if event.steps_done >= steps and event.loader in log.training_loaders:
                break
        elif isinstance(event, ForwardBegun):
            if event.sends_buffers and spans_all:
                found.append(event)
        elif isinstance(event, BackwardBegun):
            if event in log.reducing_backwards and spans_all:
                found.append(event)
        elif isinstance(event, CollectiveBegun) and event.group == list(range(world_size)):
            found.append(event)
    return found


def _is_busy(log: RankLog) -> bool:
    """Whether a rank was running and in no collective: with more time it might have entered one."""
    return not log.ended and log.open_span is None and log.first(Failed) is None


def _failed_in_collective(log: RankLog) -> bool:
    """Whether a rank failed inside a collective, which happens when another rank has ended."""
    last: list[Event] = log.of(CollectiveEnded, BackwardEnded, ForwardEnded)[-1:]
    return any(isinstance(e, CollectiveEnded | BackwardEnded) and e.raised for e in last)


def _fault(case: Case, sequences: list[list[Call]], number: int) -> Finding:
    """The call of each rank at this number. Which of them is one too many cannot be told."""
    calls = [sequence[number] if number < len(sequence) else None for sequence in sequences]
    call = next(each for each in calls if each is not None)
    unequal = _unequal_pass(case)
    if unequal is not None:
        short, loader, batches = unequal
        return Finding(
            what=f"{name_ranks(short, case.world_size)} got fewer batches than the others in one pass.",
            at=loader.at,
            ranks=short,
            step=call.steps_done + 1,
            why="each batch is a reduction over all ranks. A rank without a batch goes on to its next "
            "collective, or ends, and the others wait for it.",
            fix="give each rank the same number of batches (DistributedSampler does), or train inside "
            "`with model.join():`.",
            evidence=f"batches of the ranks in that pass: {', '.join(map(str, batches))}",
            effect="the other ranks wait forever",
        )
    of_calls: dict[str, list[int]] = {}
    for rank, each in enumerate(calls):
        called = "none" if each is None else f"{' '.join(filter(None, _kind(each)))} at {each.at}"
        of_calls.setdefault(called, []).append(rank)
    listed = (f"{name_ranks(own, case.world_size)}: {called}" for called, own in of_calls.items())
    return Finding(
        what=f"the ranks enter different collectives ({'; '.join(listed)}).",
        at=call.at,
        step=call.steps_done + 1,
        why="every rank must enter every collective, in the same order. The ranks took different ways, as "
        "under `if rank == 0`, or after a `break` on a value that is not the same on all ranks. So a call "
        "waits forever or meets another collective.",
        fix="call it on every rank; a condition around it, or one that ends a loop, must be the same on all "
        "ranks.",
        evidence=f"collective number {number + 1}{'; the run hung' * case.ordinary.hung}",
        effect=f"{len(of_calls)} different calls are matched with each other, or wait forever",
    )


def _kind(call: Call) -> tuple[str, str]:
    """The name of a collective, and its operation."""
    return _op(call), call.reduce if isinstance(call, CollectiveBegun) else ""


def _op(call: Call) -> str:
    return op_of(call) or "DDP's reduction of gradients"


def _unequal_pass(case: Case) -> tuple[list[int], LoaderSeen, list[int]] | None:
    """The ranks whose pass over a training loader ended early, the loader, and the batches of each rank."""
    for log in case.ranks:
        for key, own in log.passes.items():
            passes = [other.passes.get(key) for other in case.ranks]
            given = [len(other.batches) if other else 0 for other in passes]
            if own.ended and len(own.batches) < max(given) and key[0] in log.training_loaders:
                short = [rank for rank, n in enumerate(given) if n == len(own.batches)]
                return short, log.loaders[key[0]], given
    return None
