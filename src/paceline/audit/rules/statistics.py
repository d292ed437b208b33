"""Buffers, such as the statistics of BatchNorm, that differ between ranks where the model is used."""

from __future__ import annotations

from paceline.audit.evidence import Event
from paceline.audit.rules.rule import Case, FaultFound, Judgement, NoFault, NotJudged
from paceline.audit.rules.weights import find_mismatch


def different_buffers(case: Case) -> Judgement:
    """Buffers differ between ranks in an evaluation, else in training and at the end."""
    if not any(event["buffers"] for log in case.ranks for event in log.of("model")):
        return NoFault("the model has no buffers.")
    log = case.ranks[0]
    unwrapped = not log.of("ddp") and not any(event["sharded"] for event in log.of("model"))
    mismatch = find_mismatch(case) if unwrapped else None
    if mismatch is not None and not mismatch.outside:
        return NotJudged("the ranks' weights differ, and with them their statistics.")
    evaluations = [
        _first_by("evaluation", [e for e in log.of("forward-end") if e["evaluation"] is not None])
        for log in case.ranks
    ]
    if all(evaluations):
        return _difference(evaluations, "evaluating") or NoFault(
            "the buffers were equal on all ranks in each evaluation."
        )
    # DDP makes them equal before each forward, so after the last one they may differ a little.
    ends = [(log.first("end") or {}).get("buffers") for log in case.ranks]
    steps = [_first_by("s", log.training_forwards) for log in case.ranks]
    fault = _difference(steps, "training")
    if fault is not None and any(end != ends[0] for end in ends):
        return fault
    return NoFault("the buffers were equal on all ranks in training, or made equal at its end.")


def _first_by(key: str, events: list[Event]) -> dict[int, Event]:
    """The first event for each value of a key."""
    return {event[key]: event for event in reversed(events)}


def _difference(firsts: list[dict[int, Event]], when: str) -> FaultFound | None:
    """The first use of the model in which buffers differ between ranks."""
    for key in sorted(set.intersection(*(set(each) for each in firsts))):
        events = [each[key] for each in firsts]
        first = events[0]["buffers"]
        names = [n for n in first if len({event["buffers"].get(n) for event in events}) > 1]
        if names:
            step = events[0]["s"]
            return FaultFound(
                what=f"{names[0]} differs between ranks when {when}.",
                at=events[0]["at"],
                step=step + (when == "training"),
                why="each rank updates its buffers from its own samples, so each rank has another model.",
                fix="use SyncBatchNorm, or make the buffers equal (all_reduce or broadcast them) before "
                "the model is used.",
                evidence=f"equal names, other values, after step {step}",
                effect=f"{len(names)} of {len(first)} buffers differ between ranks",
            )
    return None
