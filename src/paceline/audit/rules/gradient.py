"""Rules about the gradient: its size, the weight of each sample in it, and whether the ranks add it up."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import torch

from paceline.audit.evidence import Event, RankLog
from paceline.audit.rules.judgement import Case, Fault, Judgement, Sound, Unknown, windows

_SAME = 0.02
_RATIO = 0.05
_SAME_DIRECTION = 0.98
_SAME_WEIGHT = 0.01


def scale(case: Case) -> Judgement:
    """The gradient of N ranks on the samples of one is not that of one, but N times or 1/N of it."""
    run = case.replay
    if run is None:
        return _scale_by_weight(case, case.why_no_replay)
    unlike = _unlike_start(case)
    if unlike:
        return _scale_by_weight(case, unlike)
    ratio, likeness = _ratio(
        case.solo.ranks[0], run.ranks[0], case.solo.plan.folder, run.plan.folder
    )
    if ratio is None:
        return Unknown("the first step's gradient was 0, or not that of the same parameters.")
    figure = f"the gradient of step 1 was {ratio:.4g} times that of one process on the same samples"
    return _judge_ratio(case, ratio, figure, alike=likeness > _SAME_DIRECTION)


def _judge_ratio(case: Case, ratio: float, figure: str, *, alike: bool) -> Judgement:
    count = case.world_size
    if abs(ratio - 1) < _SAME:
        return Sound(figure + ".")
    for factor in (count, 1 / count):
        if abs(ratio / factor - 1) < _RATIO and alike:
            return _scale_fault(case, factor > 1, figure)
    return Unknown(f"{figure}, which is neither {count} nor 1/{count}.")


def _scale_by_weight(case: Case, why: str) -> Judgement:
    """Where samples cannot be replayed: the weight of all samples of step 1, whichever they are."""
    alone = _total_weight(case.solo.ranks, case.solo.plan.folder)
    together = _total_weight(case.ranks, case.ordinary.plan.folder)
    if not alone or not together:
        return Unknown(why)
    ratio = together / alone
    figure = f"the samples of step 1 weigh {ratio:.4g} times what those of one process weigh"
    return _judge_ratio(case, ratio, figure, alike=True)


def _total_weight(ranks: list[RankLog], folder: Path) -> float | None:
    """What the losses of step 1 weigh together in the gradient that the optimizer gets."""
    total = 0.0
    for log in ranks:
        for window in windows(log)[:1]:
            for event in window:
                if event["k"] == "backward":
                    if event["weight"] is None:
                        return None
                    total += event["weight"]["weight"] * event["weight"]["count"]
    if ranks[0].of("ddp"):
        return total / len(ranks)
    factor = _share(ranks[0], folder, len(ranks))
    return None if factor is None else total * factor


def _share(log: RankLog, folder: Path, count: int) -> float | None:
    """What the script itself makes of the ranks' gradients: 1 is their sum, 1/N their mean."""
    paths = [folder / f"local-{rank}.pt" for rank in range(count)]
    used = sorted(folder.glob("gradients-*.pt"))
    if len(used) != 1 or not all(path.exists() for path in paths):
        return None
    final = torch.load(used[0], weights_only=True)
    each = [torch.load(path, weights_only=True) for path in paths]
    dot = square = 0.0
    for name, gradient in final.items():
        if not all(name in own for own in each):
            return None
        summed = torch.stack([own[name].double() for own in each]).sum(0)
        dot += float((gradient.double() * summed).sum())
        square += float((summed * summed).sum())
    if not square or any(event["k"] == "clip" for event in windows(log)[0]):
        return None
    return dot / square


def _scale_fault(case: Case, larger: bool, figure: str) -> Fault:
    log, count = case.ranks[0], case.world_size
    backward = log.first("backward") or {}
    reduced = _reduction_by_hand(log)
    if larger:
        what, fix = (
            f"the gradient is {count} times too large: it is summed over ranks and not averaged.",
            "divide by the number of ranks after the all_reduce, or let DDP take the mean.",
        )
    else:
        what, fix = (
            f"the gradient is {count} times too small: it is divided by the number of ranks twice.",
            "leave the loss undivided: DDP has averaged the gradients already.",
        )
    place = reduced if larger and reduced else backward
    return Fault(
        what=what,
        at=place.get("at", ""),
        ranks=range(count),
        step=1,
        why="a learning rate that fits one process does not fit several, and the more there are the "
        "less.",
        fix=fix,
        evidence=figure,
    )


def _reduction_by_hand(log: RankLog) -> Event | None:
    """An all_reduce between the first backward and the first step."""
    for window in windows(log)[:1]:
        begin, end = log.events.index(window[0]), log.events.index(window[-1])
        for event in log.events[begin:end]:
            if event["k"] == "collective" and event["op"] in ("all_reduce", "reduce"):
                return event
    return None


def _unlike_start(case: Case) -> str:
    """Why the first steps of the solo run and of the replay are not comparable; empty if they are."""
    assert case.replay is not None
    firsts = []
    for log in (case.solo.ranks[0], case.replay.ranks[0]):
        first = next((e for e in log.of("forward-end") if e["trains"]), None)
        if first is None or "params" not in first:
            return "no forward of training was seen."
        firsts.append(first)
    if firsts[0]["params"] != firsts[1]["params"]:
        return "the weights differ between two runs before the first step: the script sets no seed."
    rows: list[str] = []
    for log in case.replay.ranks:
        first = next((e for e in log.of("forward-end") if e["trains"]), {})
        rows += first.get("rows", [])
    if set(rows) != set(firsts[0].get("rows", [])):
        return (
            "the ranks could not be given the samples of the run of one process (they came from no "
            "DataLoader, or were changed at random after it)."
        )
    return ""


def _ratio(alone: RankLog, together: RankLog, one: Path, many: Path) -> tuple[float | None, float]:
    """How much larger the first step's gradient is, and the cosine between both."""
    clips = [_first_clip(log) for log in (alone, together)]
    dot, squares = 0.0, [0.0, 0.0]
    for path in sorted(one.glob("gradients-*.pt")):
        if not (many / path.name).exists():
            return None, 0.0
        pair = [torch.load(folder / path.name, weights_only=True) for folder in (one, many)]
        if pair[0].keys() != pair[1].keys():
            return None, 0.0
        for name in pair[0]:
            a, b = (gradients[name].double().flatten() for gradients in pair)
            dot += float(a @ b)
            squares[0] += float(a @ a)
            squares[1] += float(b @ b)
    if not all(squares):
        return None, 0.0
    likeness = dot / (squares[0] * squares[1]) ** 0.5
    if clips[0] and clips[1]:
        # Clipping makes both alike; it says what the norm was before.
        return clips[1] / clips[0], likeness
    return float((squares[1] / squares[0]) ** 0.5), likeness


def _first_clip(log: RankLog) -> float | None:
    """The norm before clipping in the first step."""
    for window in windows(log)[:1]:
        for event in window:
            if event["k"] == "clip":
                norm: float | None = event["norm"]
                return norm
    return None


def ragged_means(case: Case) -> Judgement:
    """Means over micro-batches of unequal size are added as if they were equal."""
    weighed = 0
    for run in (case.solo, case.ordinary):
        for log in run.ranks:
            for number, window in enumerate(windows(log), 1):
                backwards = [e for e in window if e["k"] == "backward"]
                weighed += sum(e["weight"] is not None for e in backwards)
                pair = _unequal(backwards)
                if pair is not None:
                    return _ragged(pair, [log.rank] if log.rank else range(case.world_size), number)
    for number, across in enumerate(zip(*(windows(log) for log in case.ranks), strict=False), 1):
        firsts = [window[0] for window in across if window[0]["k"] == "backward"]
        pair = _unequal(firsts, across=True) if _inputs_differ(case, number) else None
        if pair is not None:
            return _ragged(pair, range(case.world_size), number)
    if not weighed:
        return Unknown(
            "the loss is not a scaled sum or mean whose weight could be read off its graph."
        )
    return Sound(f"in {weighed} backwards, all samples of a step had one weight.")


def _inputs_differ(case: Case, number: int) -> bool:
    """Whether the ranks' first micro-batches of a step had different numbers of samples."""
    counts = set()
    for log in case.ranks:
        forwards = [e for e in log.of("forward-end") if e["trains"] and e["s"] == number - 1]
        counts.add(forwards[0]["n"] if forwards else None)
    return len(counts) > 1


def _unequal(backwards: list[Event], *, across: bool = False) -> tuple[Event, Event] | None:
    """Two backwards that weigh equally though they have unequal numbers of terms."""
    known = [event for event in backwards if event["weight"] is not None]
    for one, other in combinations(known, 2):
        a, b = one["weight"], other["weight"]
        same_total = abs(a["weight"] * a["count"] / (b["weight"] * b["count"]) - 1) < _SAME_WEIGHT
        # Two losses of one forward are no two micro-batches; across ranks they are.
        apart = across or one.get("forwards") is None or one["forwards"] != other["forwards"]
        alike = a.get("kind") == b.get("kind") and one["at"] == other["at"]
        if a["count"] != b["count"] and same_total and alike and apart:
            return one, other
    return None


def _ragged(pair: tuple[Event, Event], ranks: range | list[int], step: int) -> Fault:
    larger, smaller = sorted((event["weight"] for event in pair), key=lambda w: -float(w["count"]))
    return Fault(
        what=f"a mean over {smaller['count']:g} terms counts as much as one over {larger['count']:g}.",
        at=pair[0]["at"],
        ranks=list(ranks),
        step=step,
        why="the mean of means is the mean only where all parts are equally long; here a sample of the "
        f"shorter part weighs {larger['count'] / smaller['count']:.3g} times as much.",
        fix="sum the losses, and divide by the number of samples of the whole step.",
        evidence=f"weights of one term in step {step}: {larger['weight']:.4g} and "
        f"{smaller['weight']:.4g}",
    )


def not_reduced_last(case: Case) -> Judgement:
    """The last micro-batch of a step ran under `no_sync`, so the gradients stayed apart."""
    seen = 0
    for log in case.ranks:
        forward: Event | None = None
        for event in log.of("forward-end", "step"):
            if event["k"] == "forward-end":
                forward = event if event["trains"] and event["sync"] is not None else forward
                continue
            if forward is None:
                continue
            seen += 1
            if forward["sync"] is False and _gradients_differ(case, event["s"]):
                return Fault(
                    what="the last micro-batch before the optimizer step runs under `no_sync`.",
                    at=forward["at"],
                    ranks=range(case.world_size),
                    step=event["s"],
                    why="DDP adds up the gradients in a backward outside of `no_sync`; here there was "
                    "none, and each rank steps with its own.",
                    fix="leave `no_sync` for the last micro-batch of each step.",
                    evidence=f"the ranks' gradients of step {event['s']} differ",
                )
    if not seen:
        return Sound("the model is not wrapped in DDP, so there is no `no_sync`.")
    return Sound(f"{seen} steps ended with a backward that adds up the gradients.")


def _gradients_differ(case: Case, step: int) -> bool:
    kept = [
        {name: value[0] for name, value in event["grads"].items()}
        for log in case.ranks
        for event in log.of("step")
        if event["s"] == step
    ]
    return any(each != kept[0] for each in kept)


def no_sync_too_late(case: Case) -> Judgement:
    """`no_sync` around the backward alone does nothing: DDP decides in the forward."""
    log = case.ranks[0]
    forward: Event | None = None
    late: list[Event] = []
    for event in log.of("forward-end", "backward"):
        if event["k"] == "forward-end":
            forward = event if event["trains"] else forward
        elif forward is not None and forward["sync"] and event["sync"] and not any(event["sync"]):
            late.append(event)
    if not late:
        return Sound("no backward under `no_sync` had its forward outside of it.")
    return Fault(
        what="`no_sync` is around the backward only, so every micro-batch adds up the gradients.",
        at=late[0]["at"],
        ranks=range(case.world_size),
        step=late[0]["s"] + 1,
        why="DDP looks at it in the forward; in the backward it is too late. The result is right, the "
        "communication is not saved.",
        fix="put the forward inside `with model.no_sync():` too.",
        evidence=f"{len(late)} backwards of {len(log.of('backward'))} had asked for no sum and made one",
    )


def unreduced_parameter(case: Case) -> Judgement:
    """A parameter that came after DDP was built is trained by each rank for itself."""
    log = case.ranks[0]
    trained = {name for event in log.of("step") for name in event["grads"]}
    for event in log.of("unreduced"):
        if any(name == event["name"] or name.endswith(f": {event['name']}") for name in trained):
            return Fault(
                what=f"{event['name']} was frozen when DDP was built, and is trained now."
                if event.get("frozen")
                else f"{event['name']} was added to the model after DDP had wrapped it.",
                at=event["at"],
                ranks=range(case.world_size),
                step=1,
                why="DDP adds up the gradients of the parameters that were trained when it was built; each "
                "rank trains this one on its own samples.",
                fix="wrap the model anew after unfreezing it."
                if event.get("frozen")
                else "build the whole model first, then wrap it.",
                evidence="the parameter is in the optimizer and not among those DDP reduces",
            )
    if not log.of("ddp"):
        return Sound("the model is not wrapped in DDP.")
    return Sound("DDP reduces every parameter that is trained.")
