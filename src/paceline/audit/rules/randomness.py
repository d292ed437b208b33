"""Randomness: the order of the epochs, augmentation in workers, dropout."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, pairwise

from paceline.audit.evidence import Event, RankLog
from paceline.audit.rules.rule import Case, FaultFound, Judgement, NoFault, NotJudged

# The first forwards of each rank, whose noise is compared; and how many with equal states are a fault.
_FORWARDS = 3
# More numbers than this for each sample of a batch are noise.
_DRAWS_PER_SAMPLE = 2


def same_order_each_epoch(case: Case) -> Judgement:
    """Each epoch has the order of the first: `sampler.set_epoch` was not called."""
    log = case.ranks[0]
    judged = False
    for name in log.training_loaders:
        if (fault := _other_epoch_on_a_rank(case, name)) is not None:
            return fault
        loader = log.loaders[name]
        sampler = loader["sharding"]
        has_epoch = "epoch" in sampler and sampler.get("shuffle", True)
        if sampler.get("shuffle") is False or not (has_epoch or loader["takes_epoch"]):
            continue
        passes = _training_passes(log, name)
        if len(passes) < 2:
            return NotJudged("the script made one pass over its training data.")
        judged = True
        for before, after in pairwise(passes):
            same = _same_order(log, before, after)
            if same or (same is None and has_epoch and before["epoch"] == after["epoch"]):
                return _same_epoch(loader, before, after, has_epoch=has_epoch, seen=bool(same))
    if judged:
        cut = " The first one was cut short, to see the second." if log.of("pass-cut") else ""
        return NoFault(f"each pass had another order.{cut}")
    return NoFault("no sampler of the training data needs the epoch.")


def _other_epoch_on_a_rank(case: Case, name: str) -> FaultFound | None:
    """In one pass, the samplers of the ranks have different epochs."""
    passes = [_training_passes(log, name) if name in log.loaders else [] for log in case.ranks]
    for number, of_ranks in enumerate(zip(*passes, strict=False), 1):
        epochs = [event["epoch"] for event in of_ranks]
        if len(set(epochs)) > 1:
            ranks = [rank for rank, epoch in enumerate(epochs) if epoch != max(epochs)]
            return FaultFound(
                what=f"in pass {number}, the samplers of the ranks have different epochs: "
                f"{', '.join(map(str, epochs))}.",
                at=of_ranks[ranks[0]]["at"],
                ranks=ranks,
                step=of_ranks[0]["s"] + 1,
                why="the epoch decides the order of the whole dataset, and each rank takes its part of that "
                "order. Parts of different orders overlap.",
                fix="call sampler.set_epoch(epoch) on every rank, outside of branches such as "
                "`if rank == 0`.",
                evidence=f"epochs of the ranks in pass {number}: {', '.join(map(str, epochs))}",
                effect=f"{len(ranks)} of {case.world_size} ranks take their part of another order",
            )
    return None


def _same_epoch(
    loader: Event, before: Event, after: Event, *, has_epoch: bool, seen: bool
) -> FaultFound:
    passes = f"passes {before['pass_number'] + 1} and {after['pass_number'] + 1}"
    if before["loader"] != after["loader"]:
        passes = "two passes over the sampler"
    return FaultFound(
        what="every epoch has the same order"
        + (f": the sampler's epoch stays {after['epoch']}." if has_epoch else "."),
        at=after["at"],
        step=after["s"] + 1,
        why=f"{loader['sampler' if has_epoch else 'dataset']} shuffles by (seed, epoch), and the script "
        "does not set the new epoch.",
        fix=f"call {'sampler' if has_epoch else 'dataset'}.set_epoch(epoch) before each pass over the "
        "loader.",
        evidence=f"{passes} gave the same samples in the same order"
        if seen
        else f"{passes} both began with epoch {after['epoch']}",
        effect="100 % of the pass is a repetition of the order before",
    )


def _same_order(log: RankLog, one: Event, other: Event) -> bool | None:
    """Whether two passes began with the same samples in the same order; None if too few were seen."""
    keys = [(each["loader"], each["pass_number"]) for each in (one, other)]
    a, b = (
        [
            e["ids"] or e["content"]
            for e in log.of("batch")
            if (e["loader"], e["pass_number"]) == key
        ]
        for key in keys
    )
    common = min(len(a), len(b))
    if common < 2:
        return None
    ids = [i for each in a if isinstance(each, list) for i in each]
    # Data that is not shuffled at all is no fault.
    return a[:common] == b[:common] and (not ids or ids != sorted(ids))


def _training_passes(log: RankLog, name: str) -> list[Event]:
    """The passes with a backward over the loaders of one sampler, except those left after one batch."""
    sampler = log.loaders[name]["sampler_id"]
    batches: Counter[tuple[str, int]] = Counter()
    trained: set[tuple[str, int]] = set()
    last: tuple[str, int] | None = None
    for event in log.of("batch", "backward"):
        if event["k"] == "batch":
            last = event["loader"], event["pass_number"]
            batches[last] += 1
        elif last is not None:
            trained.add(last)
    ended = {(event["loader"], event["pass_number"]) for event in log.of("pass-end")}
    found = []
    for event in log.of("iter"):
        key = event["loader"], event["pass_number"]
        is_own = log.loaders[event["loader"]]["sampler_id"] == sampler
        if is_own and key in trained and (batches[key] > 1 or key in ended):
            found.append(event)
    return found


def same_augmentation(case: Case) -> Judgement:
    """Workers or ranks draw the same random numbers for their samples."""
    training = set(case.ranks[0].training_loaders)
    firsts: dict[tuple[int, int | None], Event] = {}
    for log in case.ranks:
        for event in log.fetches:
            if event["loader"] in training and event["drew"]:
                firsts.setdefault((log.rank, event["worker"]), event)
    if not firsts:
        if not all(log.fetches for log in case.ranks):
            return NotJudged("the loading of the samples was not recorded.")
        return NoFault("loading a sample draws no random numbers from a shared generator.")
    for (one, first), (other, second) in combinations(firsts.items(), 2):
        same = [
            generator
            for generator, after in first["drew"].items()
            if second["drew"].get(generator) == after
            and second["random"].get(generator) == first["random"].get(generator)
        ]
        if same:
            return FaultFound(
                what=f"{_worker(one)} and {_worker(other)} augment with the same random numbers.",
                at=case.ranks[0].loaders[first["loader"]]["at"],
                ranks=sorted({one[0], other[0]}),
                step=1,
                why=f"the generator '{same[0]}' had the same state in both when they made their first "
                "samples.",
                fix="seed by rank and worker: torch.manual_seed(seed + rank) before the loader is built, "
                "and torch.utils.data.get_worker_info().seed for a generator of the dataset.",
                evidence=f"{same[0]} state {first['random'][same[0]][:8]} in both",
                effect=f"2 of {len(firsts)} sources of samples draw the same numbers",
            )
    return NoFault(
        f"{len(firsts)} worker{'s' * (len(firsts) != 1)} drew from different random states."
    )


def _worker(which: tuple[int, int | None]) -> str:
    rank, worker = which
    return f"rank {rank}" if worker is None else f"worker {worker} of rank {rank}"


def _same_noise(case: Case, firsts: list[list[Event]]) -> FaultFound | None:
    """Between the batch and the forward, two ranks draw the same noise.

    Fewer numbers may be a choice that all ranks share, or a permutation of the batch.
    """
    for rank in range(1, case.world_size):
        pairs = list(zip(firsts[0], firsts[rank], strict=False))
        if all(
            a["random"]["torch"] == b["random"]["torch"]
            and (a["draws"] or 0) > _DRAWS_PER_SAMPLE * (a["samples"] or 1)
            for a, b in pairs
        ):
            return FaultFound(
                what=f"ranks 0 and {rank} draw the same random numbers for their batches.",
                at=firsts[0][0]["at"],
                ranks=[0, rank],
                step=1,
                why="the script draws from torch's generator between the batch and the forward, and its "
                "state is the same on both ranks, so the noise does not average out over the ranks.",
                fix="seed by rank after the model is built: torch.manual_seed(seed + rank).",
                evidence=f"equal states before {len(pairs)} forwards; at least {firsts[0][0]['draws']} "
                f"numbers for {firsts[0][0]['samples']} samples",
                effect=f"the noise of 2 of {case.world_size} ranks is equal",
            )
    return None


def _same_inputs(case: Case) -> FaultFound | None:
    """Two ranks give a model the same inputs, new ones in each step, although their batches differ."""
    for rank in range(1, case.world_size):
        logs = case.ranks[0], case.ranks[rank]
        batches = [[(e["ids"], e.get("content")) for e in log.of("batch")] for log in logs]
        if batches[0] == batches[1]:
            continue
        for model in sorted({event["model"] for event in logs[0].training_forwards}):
            inputs = [
                [e.get("rows") for e in log.training_forwards if e["model"] == model]
                for log in logs
            ]
            pairs = list(zip(*inputs, strict=False))
            is_new = len({tuple(a or ()) for a, _ in pairs}) == len(pairs)
            if len(pairs) >= _FORWARDS and is_new and all(a == b for a, b in pairs):
                first = next(e for e in logs[0].training_forwards if e["model"] == model)
                return FaultFound(
                    what=f"ranks 0 and {rank} give a model the same random inputs.",
                    at=first["at"],
                    ranks=[0, rank],
                    step=first["s"] + 1,
                    why="their batches differ, and these inputs do not: they come from generators with one "
                    "seed, so the noise does not average out over the ranks.",
                    fix="seed the generator by rank: torch.Generator().manual_seed(seed + rank).",
                    evidence=f"equal inputs in {len(pairs)} forwards, other ones in each",
                    effect=f"the inputs of 2 of {case.world_size} ranks are equal",
                )
    return None


def same_dropout(case: Case) -> Judgement:
    """The forwards of two ranks draw the same random numbers, so their dropout masks are equal."""
    forwards = [log.training_forwards for log in case.ranks]
    if not all(forwards):
        return NotJudged("not every rank ran a forward of training.")
    if not case.trains_together:
        return NotJudged("the ranks exchange no gradients, so their noise is not averaged.")
    fault = _same_noise(case, [each[:_FORWARDS] for each in forwards]) or _same_inputs(case)
    if fault is not None:
        return fault
    # Dropout draws from torch. Python's `random` decides what must be alike on all ranks, such as LayerDrop.
    used = [k for k in ("torch", "cuda") if any(k in e["drew"] for each in forwards for e in each)]
    if not used:
        return NoFault("the forward draws no random numbers from torch.")
    for rank in range(1, case.world_size):
        for name in used:
            pairs = [
                (a, b)
                for a, b in zip(forwards[0], forwards[rank], strict=False)
                if name in a["drew"]
            ]
            same = [a for a, b in pairs if a["random"].get(name) == b["random"].get(name)]
            if not same or len(same) < min(_FORWARDS, len(pairs)):
                continue
            return FaultFound(
                what=f"ranks 0 and {rank} draw the same dropout masks.",
                at=same[0]["at"],
                ranks=[0, rank],
                step=same[0]["s"] + 1,
                why=f"the generator '{name}' has the same state on both before the forward, so the noise "
                "does not average out over the ranks.",
                fix="seed by rank after the model is built: torch.manual_seed(seed + rank)."
                if len(same) == len(pairs)
                else "do not give all ranks one seed, or the random state of one rank, during the training.",
                evidence=f"equal states in {len(same)} of {len(pairs)} forwards",
                effect=f"the masks of 2 of {case.world_size} ranks are equal",
            )
    return NoFault("the ranks' forwards drew from different random states.")
