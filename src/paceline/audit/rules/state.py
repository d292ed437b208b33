"""Rules about what ranks must hold alike: weights, optimizer state, statistics; and what they must not."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.audit.evidence import Event, RankLog
from paceline.audit.rules.judgement import (
    Case,
    Fault,
    Judgement,
    Sound,
    Unknown,
    outliers,
)
from paceline.errors import name_ranks

_FORWARDS = 3


@dataclass(frozen=True)
class Split:
    """Where the ranks' weights first differ.

    Attributes:
        step: The last step before it was seen; 0 before the first.
        outside: Whether the weights were equal after that step's update, so that no optimizer did it.
        names: The parameters.
        ranks: Those that changed them, or those in the minority.
    """

    step: int
    outside: bool
    names: list[str]
    ranks: list[int]


def _before(log: RankLog) -> dict[int, dict[str, str]]:
    """Each parameter's digest in the first forward after step s."""
    found: dict[int, dict[str, str]] = {}
    for event in log.of("forward-end"):
        if "params" in event:
            prefix = f"model {event['m']}: " if event["m"] else ""
            params = {prefix + name: value for name, value in event["params"].items()}
            found.setdefault(event["s"], {}).update(params)
    return found


def _after(log: RankLog) -> dict[int, dict[str, str]]:
    found: dict[int, dict[str, str]] = {}
    for event in log.of("stepped"):
        found.setdefault(event["s"], {}).update(event["params"])
    return found


def find_split(case: Case) -> Split | None:
    """The first moment at which ranks hold different weights; None if there is none."""
    befores, afters = [_before(log) for log in case.ranks], [_after(log) for log in case.ranks]
    last = min((max(each, default=0) for each in afters), default=0)
    for step in range(last + 1):
        for points, outside in ((afters, False), (befores, True)):
            if not all(step in each for each in points):
                continue
            shared = set[str].intersection(*(set(each[step]) for each in points))
            names = [
                name
                for name in points[0][step]
                if name in shared and len({each[step][name] for each in points}) > 1
            ]
            if names and not outside and _made_equal(befores, step, names):
                continue  # an optimizer whose ranks exchange what each has updated
            if names:
                changed = [
                    rank
                    for rank in range(case.world_size)
                    if outside
                    and afters[rank].get(step, {}).get(names[0])
                    not in (None, befores[rank][step][names[0]])
                ]
                if outside and not changed:
                    changed = [
                        rank
                        for rank, log in enumerate(case.ranks)
                        if any(event["s"] == step for event in log.of("changed"))
                    ]
                odd = outliers([each[step].get(names[0]) for each in points])
                ranks = changed if 0 < len(changed) < case.world_size else odd
                return Split(step, outside, names, ranks)
    return None


def _made_equal(befores: list[dict[int, dict[str, str]]], step: int, names: list[str]) -> bool:
    """Whether weights that differed in an update were equal again when the model was used."""
    if not all(step in each for each in befores):
        return True  # the last update, whose end was not seen
    return all(len({each[step].get(name) for each in befores}) == 1 for name in names)


def _loads(case: Case, what: str, split: Split) -> list[tuple[int, Event]]:
    """The loads up to a split, if some ranks did them and others did not."""
    each = []
    for log in case.ranks:
        loads = [
            event
            for event in log.of("load", "stepped")[: _until(log, split.step)]
            if event["k"] == "load" and event["what"] == what
        ]
        each.append(loads)
    if len({len(loads) for loads in each}) == 1:
        return []
    most = max(map(len, each))
    return [(rank, loads[-1]) for rank, loads in enumerate(each) if len(loads) == most]


def _until(log: RankLog, step: int) -> int:
    """How many of a rank's loads and updates come before its first update after `step`."""
    events = log.of("load", "stepped")
    for place, event in enumerate(events):
        if event["k"] == "stepped" and event["s"] > step:
            return place
    return len(events)


def _sharded(case: Case) -> bool:
    return any(event["sharded"] for log in case.ranks for event in log.of("model"))


_SHARDED = Unknown("parameters are sharded over the ranks, so each holds another part.")


def loaded_on_one_rank(case: Case) -> Judgement:
    """A checkpoint was loaded on some ranks only, and what they hold differs since."""
    if _sharded(case):
        return _SHARDED
    split = find_split(case)
    if split is None:
        return Sound("the ranks' weights stayed equal, whatever was loaded.")
    state_differs = not split.outside and _state_differs(case, split.step)
    what = "model" if split.outside else "optimizer"
    loads = _loads(case, what, split) if split.outside or state_differs else []
    if not loads:
        return Sound("the ranks' weights differ, but not by what was loaded.")
    ranks = [rank for rank, _ in loads]
    return Fault(
        what=f"the {what}'s state was loaded on {name_ranks(ranks, case.world_size)} only.",
        at=loads[0][1]["at"],
        ranks=ranks,
        step=max(split.step, 1) if what == "optimizer" else split.step + 1,
        why="DDP makes weights equal when it is built, and never again; the other ranks go on from "
        "other values.",
        fix="load on every rank (map_location its own device), or before DDP is built.",
        evidence=f"{split.names[0]} differs between ranks "
        + ("before" if split.outside else "after")
        + f" step {split.step + 1 if split.outside else split.step}",
    )


def _state_differs(case: Case, step: int) -> bool:
    states = [
        event["state"] for log in case.ranks for event in log.of("step") if event["s"] == step
    ]
    return len(set(states)) > 1


def changed_outside(case: Case) -> Judgement:
    """Weights that differ between ranks although no optimizer step made them differ."""
    if _sharded(case):
        return _SHARDED
    split = find_split(case)
    if split is None or not split.outside:
        return Sound("between optimizer steps, weights changed on all ranks alike or not at all.")
    if _loads(case, "model", split):
        return Sound("the ranks' weights differ by what was loaded.")
    log = case.ranks[split.ranks[0] if split.ranks else 0]
    changes = [e for e in log.of("changed") if e["s"] == split.step]
    around = [e["at"] for e in log.of("step", "forward-end") if e["s"] == split.step]
    if split.step == 0 and not any(log.of("ddp") for log in case.ranks):
        return Fault(
            what="the ranks start from different weights.",
            at=around[0] if around else "",
            ranks=range(case.world_size),
            step=1,
            why=f"{split.names[0]} differs before the first step, and nothing makes it equal.",
            fix="broadcast the weights from rank 0, or wrap the model in DDP, which does.",
            evidence=f"{len(split.names)} parameters differ before step 1",
        )
    return Fault(
        what=f"{split.names[0]} was changed outside the optimizer on "
        f"{name_ranks(split.ranks, case.world_size)}.",
        at=changes[0]["at"] if changes else (around[-1] if around else ""),
        ranks=split.ranks,
        step=split.step + 1,
        why="DDP adds up gradients and not weights: what one rank does to its own stays there.",
        fix="change weights on every rank alike, or broadcast them after the change.",
        evidence=f"equal on all ranks after step {split.step}, different before step {split.step + 1}"
        if split.step
        else f"{len(split.names)} parameters differ before step 1, though DDP made them equal",
    )


def _equal_again(case: Case, split: Split) -> bool:
    """Whether the ranks hold the same weights in some step after they held different ones."""
    befores = [_before(log) for log in case.ranks]
    later = set[int].intersection(*(set(each) for each in befores))
    return any(
        step > split.step
        and all(len({each[step].get(name) for each in befores}) == 1 for name in split.names)
        for step in later
    )


def drift(case: Case) -> Judgement:
    """Weights that differ after an optimizer step, for a reason that no other rule has."""
    if _sharded(case):
        return _SHARDED
    split = find_split(case)
    if split is None or split.outside:
        return Sound("after each optimizer step the ranks' weights were equal.")
    if _equal_again(case, split):
        return Unknown(
            f"the ranks' weights differ after step {split.step} and are equal again some steps later: they "
            "are averaged now and then (local SGD)."
        )
    steps = [next(e for e in log.of("step") if e["s"] == split.step) for log in case.ranks]
    gradients = [step["grads"].get(split.names[0], [None])[0] for step in steps]
    if len(set(gradients)) > 1:
        why, fix = (
            "its gradient differs between ranks too: it was not added up.",
            "wrap the model in DDP, or all_reduce each gradient before the step.",
        )
    elif len({tuple(step["lrs"]) for step in steps}) > 1:
        why, fix = "the learning rates differ between ranks.", "use one learning rate on all ranks."
    else:
        why, fix = (
            "its gradient is the same on all ranks; the optimizers' states are not.",
            "build, load and step the optimizer alike on all ranks.",
        )
    return Fault(
        what=f"the ranks' weights differ after step {split.step}: {split.names[0]}.",
        at=steps[0]["at"],
        ranks=range(case.world_size),
        step=split.step,
        why=why,
        fix=fix,
        evidence=f"{len(split.names)} parameters differ",
    )


def statistics(case: Case) -> Judgement:
    """Buffers, such as BatchNorm's statistics, that differ where the model is used."""
    if not any(event["buffers"] for log in case.ranks for event in log.of("model")):
        return Sound("the model has no statistics.")
    evaluations = [_first_evaluations(log) for log in case.ranks]
    if all(evaluations):
        return _alike(case, evaluations, "evaluating") or Sound(
            "the statistics were equal on all ranks in each evaluation."
        )
    # DDP makes them equal before each forward, so after the last one they may differ a little.
    ends = [(log.first("end") or {}).get("buffers") for log in case.ranks]
    fault = _alike(case, [_first_of_steps(log) for log in case.ranks], "training")
    if fault is not None and any(end != ends[0] for end in ends):
        return fault
    return Sound("the statistics were equal on all ranks in training, or made equal at its end.")


def _alike(case: Case, firsts: list[dict[int, Event]], when: str) -> Fault | None:
    """The first use of the model in which buffers differ between ranks."""
    for key in sorted(set.intersection(*(set(each) for each in firsts))):
        events = [each[key] for each in firsts]
        differing = [
            name
            for name in events[0]["buffers"]
            if len({event["buffers"].get(name) for event in events}) > 1
        ]
        if differing:
            return Fault(
                what=f"{differing[0]} differs between ranks when {when}.",
                at=events[0]["at"],
                ranks=range(case.world_size),
                step=events[0]["s"] + (when == "training"),
                why="each rank gathers statistics from its own samples, so each has another model.",
                fix="use SyncBatchNorm, or make the buffers equal (all_reduce or broadcast them) "
                "before the model is used.",
                evidence=f"{len(differing)} of {len(events[0]['buffers'])} buffers differ after step "
                f"{events[0]['s']}",
            )
    return None


def _first_evaluations(log: RankLog) -> dict[int, Event]:
    found: dict[int, Event] = {}
    for event in log.of("forward-end"):
        if event["evaluation"] is not None:
            found.setdefault(event["evaluation"], event)
    return found


def _first_of_steps(log: RankLog) -> dict[int, Event]:
    found: dict[int, Event] = {}
    for event in log.of("forward-end"):
        if event["trains"]:
            found.setdefault(event["s"], event)
    return found


def same_dropout(case: Case) -> Judgement:
    """Ranks whose forwards draw the same random numbers: one dropout mask for all."""
    firsts = [[e for e in log.of("forward-end") if e["trains"]][:_FORWARDS] for log in case.ranks]
    if not all(firsts):
        return Unknown("not every rank had a forward of training.")
    drawing = [event for each in firsts for event in each if event["drew"]]
    if not drawing:
        return Sound("the forward draws no random numbers.")
    for rank in range(1, case.world_size):
        pairs = list(zip(firsts[0], firsts[rank], strict=False))
        same = [
            stream
            for stream in drawing[0]["drew"]
            if all(a["random"].get(stream) == b["random"].get(stream) for a, b in pairs)
        ]
        if same:
            return Fault(
                what=f"ranks 0 and {rank} draw the same dropout masks.",
                at=firsts[0][0]["at"],
                ranks=[0, rank],
                step=1,
                why=f"the generator '{same[0]}' is in the same state on both before each forward, so "
                "the noise does not average out over ranks.",
                fix="after the model is built, seed by rank: torch.manual_seed(seed + rank).",
                evidence=f"equal states in {len(pairs)} forwards",
            )
    return Sound("the ranks' forwards drew from different random states.")


def devices(case: Case) -> Judgement:
    """All ranks on one device, or on none where there are some."""
    starts = [log.first("start") or {} for log in case.ranks]
    used = [next((e for e in log.of("forward-end") if "devices" in e), None) for log in case.ranks]
    if not all(used):
        return Unknown("not every rank had a forward of training.")
    firsts: list[Event] = [event for event in used if event is not None]
    names = [
        (start.get("host"), tuple(e["devices"])) for start, e in zip(starts, firsts, strict=True)
    ]
    on_cpu = all(device == "cpu" for _, each in names for device in each)
    at = next((e["at"] for e in case.ranks[0].of("model")), "")
    fault = _on_devices(names, at, case) if not on_cpu else None
    if on_cpu and starts[0].get("cuda_devices"):
        fault = Fault(
            what=f"the model is on the CPU, and {starts[0]['cuda_devices']} GPUs are idle.",
            at=at,
            ranks=range(case.world_size),
            why="nothing moved it.",
            fix='model.to(torch.device("cuda", int(os.environ["LOCAL_RANK"]))).',
            evidence="all parameters are on the CPU",
        )
    if on_cpu and fault is None:
        fault = _on_cores(starts, firsts, case)
    return fault or Sound(f"devices: {', '.join(sorted({d for _, each in names for d in each}))}.")


def _on_devices(names: list[tuple[object, tuple[str, ...]]], at: str, case: Case) -> Fault | None:
    sharing = [rank for rank, each in enumerate(names) if names.count(each) > 1]
    if not sharing:
        return None
    return Fault(
        what=f"{name_ranks(sharing, case.world_size)} use one device, {names[sharing[0]][1][0]}.",
        at=at,
        ranks=sharing,
        why="the device's number is the same on all ranks of a host.",
        fix='torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), and put the model there.',
        evidence=", ".join(f"rank {rank}: {each[1][0]}" for rank, each in enumerate(names)),
    )


def _on_cores(starts: list[Event], firsts: list[Event], case: Case) -> Fault | None:
    """The like on a machine without GPUs: ranks that bound themselves to the same cores."""
    cores = [event["cores"] for event in firsts]
    union = {core for each in cores for core in each}
    bound = all(len(own) < len(start["cores"]) for own, start in zip(cores, starts, strict=True))
    if not bound or len(union) >= min(len(starts[0]["cores"]), case.world_size):
        return None
    return Fault(
        what=f"all ranks run on core {', '.join(map(str, sorted(union)))}, of {len(starts[0]['cores'])}.",
        at=firsts[0]["at"],
        ranks=range(case.world_size),
        why="the script binds each rank to the same cores, so they take turns.",
        fix="bind by LOCAL_RANK, or leave the cores to the launcher.",
        evidence=", ".join(f"rank {rank}: {each}" for rank, each in enumerate(cores)),
    )
