"""`no_sync` without effect, and parameters that DDP does not know."""

from __future__ import annotations

from paceline.audit.events import BackwardBegun, ForwardEnded, NotReduced, OptimizerStepBegun
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault


def no_sync_around_backward(case: Case) -> Judgement:
    """`no_sync` around the backward alone has no effect: DDP decides in the forward.

    The gradient is right, and yet this is a fault: the script asks for something that does not happen.
    """
    log = case.ranks[0]
    forward: ForwardEnded | None = None
    late: list[BackwardBegun] = []
    for event in log.events:
        if isinstance(event, ForwardEnded):
            forward = event if event.trains else forward
        elif isinstance(event, BackwardBegun) and forward is not None and forward.sync:
            late += [event] if event.sync and not any(event.sync) else []
    if not late:
        return NoFault("no backward under `no_sync` had its forward outside of it.")
    return Finding(
        what="`no_sync` is around the backward only, so every micro-batch reduces the gradients.",
        at=late[0].at,
        step=late[0].steps_done + 1,
        why="DDP reads the setting in the forward. The result is correct, but no communication is saved.",
        fix="put the forward inside `with model.no_sync():` too.",
        evidence=f"{len(late)} of {len(log.of(BackwardBegun))} backwards ran under `no_sync` and still "
        "reduced the gradients",
        effect=f"{len(late)} reductions too many; the gradient is right",
    )


def added_parameter(case: Case) -> Judgement:
    """A parameter that came after DDP was built is trained by each rank alone."""
    log = case.ranks[0]
    alone = [event for event in log.of(NotReduced) if not _has_equal_gradients(case, event.name)]
    if not alone:
        return NoFault(
            "of models in DDP, each trained parameter is reduced by DDP or by the script."
        )
    first = alone[0]
    trained = {name for event in log.of(OptimizerStepBegun) for name in event.grads}
    what = f"{first.name} was added to the model after DDP had wrapped it."
    fix = "build the whole model first, then wrap it."
    if first.frozen:
        what = f"{first.name} was frozen when DDP was built, and is trained now."
        fix = "wrap the model again after unfreezing it."
    return Finding(
        what=what,
        at=first.at,
        step=first.steps_done + 1,
        why="DDP reduces the gradients of the parameters that were trainable when it was built; each rank "
        "trains this one on its own samples only.",
        fix=fix,
        evidence="the optimizer has the parameter, and DDP does not reduce it",
        effect=f"{len(alone)} of {len(trained)} trained parameters are not reduced",
    )


def _has_equal_gradients(case: Case, name: str) -> bool:
    """Whether the gradients of a parameter are those of all ranks in each step: the script reduces it.

    See sound/10_reduced_by_hand.
    """
    of_ranks = [[e.grads.get(name) for e in log.of(OptimizerStepBegun)] for log in case.ranks]
    return any(of_ranks[0]) and all(own == of_ranks[0] for own in of_ranks)
