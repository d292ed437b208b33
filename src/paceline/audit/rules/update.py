"""Rules about what stands between the gradient and the update: unscaling, clipping, stepping."""

from __future__ import annotations

from paceline.audit.rules.judgement import Case, Fault, Judgement, Sound, outliers, updates
from paceline.errors import name_ranks


def clipped_scaled(case: Case) -> Judgement:
    """Gradients are clipped while the loss scale is still in them."""
    clips = 0
    for run in (case.ordinary, case.solo):
        for log in run.ranks:
            for event in log.of("clip"):
                clips += 1
                if event["scale"] != 1:
                    step = sum(e["k"] == "step" for e in log.events[: log.events.index(event)]) + 1
                    return Fault(
                        what="gradients are clipped before they are unscaled.",
                        at=event["at"],
                        ranks=range(run.plan.world_size),
                        step=step,
                        why=f"they are still {event['scale']:g} times too large, so the bound cuts off "
                        "nearly all of them.",
                        fix="call scaler.unscale_(optimizer) before clipping.",
                        evidence=f"the norm at the clip was {event['norm']:.4g}, scale included"
                        if event["norm"] is not None
                        else f"the scale at the clip was {event['scale']:g}",
                    )
    return Sound(
        f"{clips} clips, all of unscaled gradients."
        if clips
        else "torch's clipping was not called."
    )


def one_rank_alone(case: Case) -> Judgement:
    """One rank clips, unscales or steps where the others do not."""
    each = [updates(log) for log in case.ranks]
    for number, across in enumerate(zip(*each, strict=False), 1):
        did = [tuple(e["k"] for e in after[1:]) for after in across]
        odd = outliers(did)
        if not odd or number == min(map(len, each)):
            continue  # equal, or the last one seen, in whose midst the run may have ended
        usual = next(did[rank] for rank in range(len(did)) if rank not in odd)
        calls = [e for after in across for e in after[1:]]
        differing = [e for e in calls if (e["k"] in did[odd[0]]) != (e["k"] in usual)]
        said, who = _did(did)
        step = 1 + sum(e["k"] == "step" for after in each[0][: number - 1] for e in after)
        return Fault(
            what=f"in step {step} the ranks do different things: {said}.",
            at=(differing or calls)[0]["at"],
            ranks=who or odd,
            step=step,
            why="gradients are equal on all ranks after their sum; what one rank alone does to them "
            "makes its weights differ.",
            fix="clip, unscale and step on every rank; decide on values that all ranks share.",
            evidence="; ".join(f"rank {r}: {' '.join(d) or 'nothing'}" for r, d in enumerate(did)),
        )
    return Sound("all ranks unscaled, clipped and stepped alike.")


def _did(did: list[tuple[str, ...]]) -> tuple[str, list[int]]:
    """What some ranks did that others did not, and who is out of line."""
    words = {"clip": "clipped", "scaler-unscale": "unscaled", "scaler-step": "used the scaler"}
    for kind, word in words.items():
        having = [rank for rank, kinds in enumerate(did) if kind in kinds]
        if 0 < len(having) < len(did):
            lacking = [rank for rank in range(len(did)) if rank not in having]
            if len(having) <= len(lacking) and kind != "scaler-step":
                return f"{name_ranks(having)} alone {word}", having
            return f"{name_ranks(lacking)} alone {_NOT[kind]}", lacking
    lacking = [rank for rank, kinds in enumerate(did) if "step" not in kinds]
    if 0 < len(lacking) < len(did):
        return f"{name_ranks(lacking)} alone did not update", lacking
    return "in another order or number", []


_NOT = {
    "clip": "did not clip",
    "scaler-unscale": "did not unscale",
    "scaler-step": "went without the scaler",
}
