"""Whether DDP reduces every gradient: `no_sync`, and parameters that DDP does not know."""

from __future__ import annotations

from paceline.audit.evidence import Event
from paceline.audit.rules.rule import Case, FaultFound, Judgement, NoFault


def no_sync_on_last(case: Case) -> Judgement:
    """The last micro-batch of a step ran under `no_sync`, so the gradients were not reduced."""
    seen = 0
    for log in case.ranks:
        forward: Event | None = None
        for event in log.of("forward-end", "step"):
            if event["k"] == "forward-end":
                forward = event if event["trains"] and event["sync"] is not None else forward
            elif forward is not None:
                seen += 1
                if forward["sync"] is False and _gradients_differ(case, event["s"]):
                    return FaultFound(
                        what="the last micro-batch before the optimizer step runs under `no_sync`.",
                        at=forward["at"],
                        step=event["s"],
                        why="DDP reduces the gradients in a backward outside of `no_sync`. Without one, "
                        "each rank steps with its own gradients.",
                        fix="leave `no_sync` for the last micro-batch of each step.",
                        evidence=f"the ranks' gradients of step {event['s']} differ",
                        effect="0 of the gradients of the step are reduced over the ranks",
                    )
    if not seen:
        return NoFault("the model is not wrapped in DDP, so there is no `no_sync`.")
    return NoFault(f"{seen} steps ended with a backward that reduces the gradients.")


def _gradients_differ(case: Case, step: int) -> bool:
    steps = (e for log in case.ranks for e in log.of("step") if e["s"] == step)
    first, *others = ({name: value[0] for name, value in e["grads"].items()} for e in steps)
    return any(own != first for own in others)


def no_sync_around_backward(case: Case) -> Judgement:
    """`no_sync` around the backward alone has no effect: DDP decides in the forward."""
    log = case.ranks[0]
    forward: Event | None = None
    late: list[Event] = []
    for event in log.of("forward-end", "backward"):
        if event["k"] == "forward-end":
            forward = event if event["trains"] else forward
        elif forward is not None and forward["sync"] and event["sync"] and not any(event["sync"]):
            late.append(event)
    if not late:
        return NoFault("no backward under `no_sync` had its forward outside of it.")
    return FaultFound(
        what="`no_sync` is around the backward only, so every micro-batch reduces the gradients.",
        at=late[0]["at"],
        step=late[0]["s"] + 1,
        why="DDP reads the setting in the forward. The result is correct, but no communication is saved.",
        fix="put the forward inside `with model.no_sync():` too.",
        evidence=f"{len(late)} of {len(log.of('backward'))} backwards ran under `no_sync` and still "
        "reduced the gradients",
        effect=f"{len(late)} reductions too many; the gradient is right",
    )


def added_parameter(case: Case) -> Judgement:
    """A parameter that came after DDP was built is trained by each rank alone."""
    log = case.ranks[0]
    trained = {name for event in log.of("step") for name in event["grads"]}
    for event in log.of("unreduced"):
        name, frozen = event["name"], event["frozen"]
        if any(each == name or each.endswith(f": {name}") for each in trained):
            return FaultFound(
                what=f"{name} was frozen when DDP was built, and is trained now."
                if frozen
                else f"{name} was added to the model after DDP had wrapped it.",
                at=event["at"],
                step=1,
                why="DDP reduces the gradients of the parameters that were trainable when it was built; "
                "each rank trains this one on its own samples only.",
                fix="wrap the model again after unfreezing it."
                if frozen
                else "build the whole model first, then wrap it.",
                evidence="the optimizer has the parameter, and DDP does not reduce it",
                effect=f"{len(log.of('unreduced'))} of {len(trained)} trained parameters are not reduced",
            )
    if not log.of("ddp"):
        return NoFault("the model is not wrapped in DDP.")
    return NoFault("DDP reduces every parameter that is trained.")
