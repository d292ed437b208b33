"""All ranks on one device or one core, or idle GPUs."""

from __future__ import annotations

from functools import partial

from paceline.audit.events import RankStarted
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault, NotJudged
from paceline.errors import name_ranks


def shared_device(case: Case) -> Judgement:
    """Ranks of one host share a device or a core, or use none of its GPUs."""
    count = case.world_size
    starts = [log.first(RankStarted) or RankStarted() for log in case.ranks]
    firsts = [next((e for e in log.training_forwards if e.devices), None) for log in case.ranks]
    forwards = [event for event in firsts if event is not None]
    if len(forwards) < count:
        return NotJudged("not every rank called a torch.nn.Module in training.")
    used = [(e.visible_devices, e.devices) for e in forwards]
    names = sorted({device for event in forwards for device in event.devices})
    gpus = starts[0].cuda_devices
    fault = partial(Finding, at=forwards[0].at)
    if names != ["cpu"]:
        sharing = [rank for rank, each in enumerate(used) if used.count(each) > 1]
        if sharing:
            return fault(
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
        return fault(
            what=f"the model is on the CPU, and {gpus} GPUs are idle.",
            why="no line of the script moves the model to a GPU.",
            fix='model.to(torch.device("cuda", int(os.environ["LOCAL_RANK"]))).',
            evidence="all parameters are on the CPU",
            effect=f"{gpus} of {gpus} GPUs are not used",
            is_note=True,  # the result is right, and a small model may be faster without them
        )
    else:
        cores = [event.cores for event in forwards]
        union, usable = sorted({core for own in cores for core in own}), len(starts[0].cores)
        bound = all(len(own) < len(s.cores) for own, s in zip(cores, starts, strict=True))
        if bound and len(union) < min(usable, count):
            return fault(
                what=f"all ranks run on core {', '.join(map(str, union))}, of {usable}.",
                why="the script binds every rank to the same cores, so the ranks run one after the other.",
                fix="bind each rank to other cores by LOCAL_RANK, or do not bind.",
                evidence=", ".join(f"rank {rank}: {own}" for rank, own in enumerate(cores)),
                effect=f"{len(union)} of {usable} cores are used",
            )
    return NoFault(f"devices: {', '.join(names)}.")
