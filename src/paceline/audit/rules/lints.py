"""Faults that one process may have too, or that only cost time: each is seen in the order of a few calls."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain

from paceline.audit.events import (
    BackwardBegun,
    Clipped,
    ForwardEnded,
    RankStarted,
    ScalerStepped,
    Unscaled,
)
from paceline.audit.evidence import RankLog, Update
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault, NotJudged
from paceline.errors import name_ranks


def clip_before_unscale(case: Case) -> Judgement:
    """Gradients are clipped while they still contain the loss scale."""
    logs = [log for run in (case.ordinary, case.solo) for log in run.ranks]
    for update, event in chain.from_iterable(map(_clips_with_scale, logs)):
        norm = "" if event.norm is None else f", and the norm with it {event.norm:.4g}"
        return Finding(
            what="gradients are clipped before they are unscaled.",
            at=event.at,
            step=update.step,
            why=f"they are still {event.scale:g} times too large for the bound.",
            fix="call scaler.unscale_(optimizer) before clipping.",
            evidence=f"the scale at the clip was {event.scale:g}{norm}",
            effect=f"gradients are clipped at a norm {event.scale:g} times too small",
        )
    clips = sum(len(log.of(Clipped)) for log in logs)
    if not clips:
        return NoFault("torch's clipping was not called.")
    return NoFault(f"{clips} calls of torch's clipping, each to a bound of the gradients' scale.")


def _clips_with_scale(log: RankLog) -> Iterator[tuple[Update, Clipped]]:
    """The clips of gradients that have the loss scale, to a bound that has not, each with its update.

    Another optimizer than the scaler's has gradients without it. A bound that has the scale is nearer to the
    scale than to 1, in orders of magnitude.
    """
    unscaled: set[str] = set()
    for update in log.updates:
        steps = [call.names for call in update.calls if isinstance(call, ScalerStepped)]
        scaled = set(chain.from_iterable(steps))
        for call in update.calls:
            if isinstance(call, Unscaled):
                unscaled.update(call.names)
            elif isinstance(call, ScalerStepped):
                unscaled.difference_update(call.names)
            elif isinstance(call, Clipped) and call.scale != 1:
                is_scaled = scaled & {*call.names} - unscaled
                is_known = call.max_norm is not None
                if is_scaled and is_known and (call.max_norm or 0.0) < call.scale**0.5:
                    yield update, call


def no_sync_around_backward(case: Case) -> Judgement:
    """`no_sync` around the backward alone has no effect: DDP decides in the forward."""
    log = case.ranks[0]
    forward = ForwardEnded()
    late: list[BackwardBegun] = []
    for event in log.events:
        if isinstance(event, ForwardEnded):
            forward = event if event.trains else forward
        elif isinstance(event, BackwardBegun) and forward.sync:
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
        is_note=True,
    )


def shared_device(case: Case) -> Judgement:
    """Ranks of one host share a device or a core, or use none of its GPUs."""
    count = case.world_size
    starts = [log.first(RankStarted) or RankStarted() for log in case.ranks]
    firsts = [next((e for e in log.training_forwards if e.devices), None) for log in case.ranks]
    forwards = [event for event in firsts if event is not None]
    if len(forwards) < count:
        return NotJudged("not every rank called a torch.nn.Module in training.")
    names = sorted({device for event in forwards for device in event.devices})
    gpus, usable = starts[0].cuda_devices, len(starts[0].cores)
    finding = partial(Finding, at=forwards[0].at)
    if names != ["cpu"]:
        used = [(e.visible_devices, e.devices) for e in forwards]
        if sharing := [rank for rank, each in enumerate(used) if used.count(each) > 1]:
            return finding(
                what=f"{name_ranks(sharing, count)} use one device, {forwards[sharing[0]].devices[0]}.",
                ranks=sharing,
                why="all ranks of a host use the same device number.",
                fix='torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), and move the model to that '
                "device.",
                evidence=", ".join(f"rank {r}: {e.devices[0]}" for r, e in enumerate(forwards)),
                effect=f"{len(sharing)} of {count} ranks share a device",
                is_note=0 < gpus < count,  # there are not enough of them
            )
    elif gpus:
        return finding(
            what=f"the model is on the CPU, and {gpus} GPUs are idle.",
            why="no line of the script moves the model to a GPU.",
            fix='model.to(torch.device("cuda", int(os.environ["LOCAL_RANK"]))).',
            evidence="all parameters are on the CPU",
            effect=f"{gpus} of {gpus} GPUs are not used",
            is_note=True,  # the result is right, and a small model may be faster without them
        )
    cores = [event.cores for event in forwards]
    union = sorted({core for own in cores for core in own})
    if names == ["cpu"] and 0 < len(union) < min(usable, count):
        return finding(
            what=f"all ranks run on core {', '.join(map(str, union))}, of {usable}.",
            why="the script binds every rank to the same cores, so the ranks run one after the other.",
            fix="bind each rank to other cores by LOCAL_RANK, or do not bind.",
            evidence=", ".join(f"rank {rank}: {own}" for rank, own in enumerate(cores)),
            effect=f"{len(union)} of {usable} cores are used",
        )
    return NoFault(f"the models are on {', '.join(names)}.")
