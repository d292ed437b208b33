"""Process groups of one rank, in which nothing is exchanged."""

from __future__ import annotations

from paceline.audit.events import DDPBuilt, GroupInitialised, TensorsSent
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault, NotJudged


def group_of_one(case: Case) -> Judgement:
    """Each rank has a process group of its own, or DDP reduces over such a group."""
    groups = [
        max(log.of(GroupInitialised), key=lambda e: e.size, default=None) for log in case.ranks
    ]
    wrapped = [event for log in case.ranks for event in log.of(DDPBuilt)]
    is_alone = all(group is not None and group.size == 1 for group in groups)
    reduces_nothing = bool(wrapped) and all(event.group_size == 1 for event in wrapped)
    # With equal weights, the script reduces the gradients itself.
    if not is_alone and not (reduces_nothing and case.mismatch is not None):
        return NoFault("the process groups have more than one rank.")
    exchanges_parts = any(
        log.layouts or log.of(TensorsSent) or log.exchanges_activations or log.exchanges_parts
        for log in case.ranks
    )
    if not is_alone and exchanges_parts:
        return NotJudged("the ranks may hold parts of one model, each with a DDP of one rank.")
    what = "each rank has initialised a process group of its own."
    why = "init_process_group() got a world size of 1, and not that of the job."
    fix = "let it read RANK and WORLD_SIZE from the environment: leave the arguments out."
    at = groups[0].at if groups[0] else ""
    if not is_alone:
        what, at = "DDP reduces the gradients over a group of one rank.", wrapped[0].at
        why, fix = (
            "the process group that DDP got has one rank, so each rank trains alone.",
            "give DDP the group of the ranks that have other samples, or none for all ranks.",
        )
    return Finding(
        what=what,
        at=at,
        step=1,
        why=why,
        fix=fix,
        evidence=f"the group has 1 rank on each of {case.world_size} ranks",
        effect=f"{case.world_size} models are trained, each on its own samples",
    )
