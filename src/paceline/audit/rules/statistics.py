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


def different_untrained_models(case: Case) -> Judgement:
    """The ranks evaluate a model that is not trained, such as a mean of the weights, with other weights."""
    each = [
        {(e["evaluation"], e["model"]): e for e in log.of("forward-end") if "other_params" in e}
        for log in case.ranks
    ]
    shared = sorted(set.intersection(*map(set, each)))
    for key in shared:
        events = [own[key] for own in each]
        first = events[0]["other_params"]
        names = [n for n in first if len({e["other_params"].get(n) for e in events}) > 1]
        if names:
            return FaultFound(
                what=f"the ranks evaluate a model with different weights: {names[0]}.",
                at=events[0]["at"],
                step=events[0]["s"] or None,
                why="no optimizer trains this model, so the script has to keep it equal: a mean of "
                "the weights (EMA) that only one rank updates is not.",
                fix="update it on every rank, or broadcast it before the evaluation.",
                evidence=f"the digests of {names[0]} in the evaluation after step {events[0]['s']}",
                effect=f"{len(names)} of {len(first)} parameters differ between ranks",
            )
    if not shared:
        return NoFault("all models that were evaluated are trained.")
    return NoFault(
        f"in {len(shared)} evaluations, a model that is not trained was equal on all ranks."
    )


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
