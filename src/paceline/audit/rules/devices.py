"""All ranks on one device or one core, or idle GPUs."""

from __future__ import annotations

from paceline.audit.evidence import Event
from paceline.audit.rules.rule import Case, FaultFound, Judgement, NoFault, NotJudged
from paceline.errors import name_ranks


def shared_device(case: Case) -> Judgement:
    """Ranks of one host share a device, or use none of its GPUs."""
    starts = [log.first("start") or {} for log in case.ranks]
    firsts: list[Event] = []
    for log in case.ranks:
        firsts += [event for event in log.training_forwards if "devices" in event][:1]
    if len(firsts) < case.world_size:
        return NotJudged("not every rank ran a forward of training.")
    used = [
        (start.get("host"), tuple(e["devices"])) for start, e in zip(starts, firsts, strict=True)
    ]
    names = sorted({device for _, each in used for device in each})
    at = next((event["at"] for event in case.ranks[0].of("model")), "")
    gpus = starts[0].get("cuda_devices")
    fault: FaultFound | None
    if names != ["cpu"]:
        fault = _shared_device(case, used, at)
    elif gpus:
        fault = FaultFound(
            what=f"the model is on the CPU, and {gpus} GPUs are idle.",
            at=at,
            why="no line of the script moves the model to a GPU.",
            fix='model.to(torch.device("cuda", int(os.environ["LOCAL_RANK"]))).',
            evidence="all parameters are on the CPU",
            effect=f"{gpus} of {gpus} GPUs are not used",
        )
    else:
        fault = _shared_cores(case, starts, firsts)
    return fault or NoFault(f"devices: {', '.join(names)}.")


def _shared_device(
    case: Case, used: list[tuple[object, tuple[str, ...]]], at: str
) -> FaultFound | None:
    sharing = [rank for rank, each in enumerate(used) if used.count(each) > 1]
    if not sharing:
        return None
    return FaultFound(
        what=f"{name_ranks(sharing, case.world_size)} use one device, {used[sharing[0]][1][0]}.",
        at=at,
        ranks=sharing,
        why="all ranks of a host use the same device number.",
        fix='torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), and move the model to that device.',
        evidence=", ".join(f"rank {rank}: {each[1][0]}" for rank, each in enumerate(used)),
        effect=f"{len(sharing)} of {case.world_size} ranks share a device",
    )


def _shared_cores(case: Case, starts: list[Event], firsts: list[Event]) -> FaultFound | None:
    """The same fault on a host without GPUs: the script binds all ranks to the same cores."""
    cores = [event["cores"] for event in firsts]
    union = {core for each in cores for core in each}
    bound = all(len(own) < len(start["cores"]) for own, start in zip(cores, starts, strict=True))
    if not bound or len(union) >= min(len(starts[0]["cores"]), case.world_size):
        return None
    return FaultFound(
        what=f"all ranks run on core {', '.join(map(str, sorted(union)))}, of {len(starts[0]['cores'])}.",
        at=firsts[0]["at"],
        why="the script binds every rank to the same cores, so the ranks run one after the other.",
        fix="bind each rank to other cores by LOCAL_RANK, or do not bind.",
        evidence=", ".join(f"rank {rank}: {each}" for rank, each in enumerate(cores)),
        effect=f"{len(union)} of {len(starts[0]['cores'])} cores are used",
    )
