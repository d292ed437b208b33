"""Random numbers: whether ranks or workers draw the same ones. It only costs variance, so it is a note."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

from paceline.audit.events import ForwardEnded, SamplesLoaded
from paceline.audit.evidence import RankLog
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault, NotJudged
from paceline.errors import name_ranks

_SEED = "seed by rank after the model is built: torch.manual_seed(seed + rank)."
_SEED_WORKERS = (
    "seed by rank and worker: torch.manual_seed(seed + rank) before the loader is built, and "
    "torch.utils.data.get_worker_info().seed for a generator of the dataset."
)


def random_numbers(case: Case) -> Judgement:
    """Two ranks or workers draw the same numbers for their samples, or in forwards of training."""
    if case.divides_equal_batches:
        return NoFault("the ranks load the same batches, and each trains on its own part of them.")
    note = _of_samples(case) or _of_forwards(case)
    if note is not None:
        return note
    loads, forwards = (
        sum(map(len, own))
        for own in zip(*((log.fetches, log.training_forwards) for log in case.ranks), strict=True)
    )
    if not loads and not forwards:
        return NotJudged("neither the loading of samples nor a forward of training was seen.")
    return NoFault(
        f"no two ranks drew the same numbers in most of {forwards} forwards, and no two workers for the "
        f"first of {loads} batches."
    )


def _of_samples(case: Case) -> Finding | None:
    """A note on the first two ranks or workers that load their first samples with the same numbers."""
    of_rank0 = case.ranks[0]
    names = of_rank0.training_loaders
    training = {name: loader for name, loader in of_rank0.loaders.items() if name in names}
    firsts: dict[tuple[int, int | None], SamplesLoaded] = {}
    for log in case.ranks:
        for event in log.fetches:
            # A stream may draw the order of samples that are the rank's own.
            is_judged = event.loader in training and not training[event.loader].iterable
            if is_judged and event.drew:
                firsts.setdefault((log.rank, event.worker), event)
    for (one, first), (other, second) in combinations(firsts.items(), 2):
        for name, after in first.drew.items():
            states = (first.random.get(name), after)
            if states == (second.random.get(name), second.drew.get(name)):
                return Finding(
                    what=f"{_worker(one)} and {_worker(other)} augment with the same random numbers.",
                    at=training[first.loader].at,
                    ranks=sorted({one[0], other[0]}),
                    step=1,
                    why=f"the generator '{name}' had the same state in both when they made their first "
                    "samples.",
                    fix=_SEED_WORKERS,
                    evidence=f"the states of {name} before and after them are equal",
                    effect=f"at least 2 of {len(firsts)} sources of samples draw the same numbers",
                    is_note=True,
                )
    return None


def _worker(which: tuple[int, int | None]) -> str:
    rank, worker = which
    return f"rank {rank}" if worker is None else f"worker {worker} of rank {rank}"


def _state(generator: str) -> Callable[[ForwardEnded], int | None]:
    return lambda forward: forward.random.get(generator) if generator in forward.drew else None


# What decides the random numbers of a forward; and how two ranks with equal ones are reported. Python's
# `random` decides what must be alike on all ranks, such as LayerDrop.
_KINDS: dict[str, tuple[Callable[[ForwardEnded], int | None], str]] = {
    "draw the same random numbers for their batches": (
        lambda forward: forward.random["torch"] if forward.draws else None,
        "the script draws from torch's generator between the batch and the forward, and its state is the "
        "same on both",
    ),
    "draw the same random numbers in their forwards, such as dropout masks": (
        _state("torch"),
        "the generator 'torch' has the same state on both before the forward",
    ),
    "draw the same random numbers on their GPUs, such as dropout masks": (
        _state("cuda"),
        "the generator 'cuda' has the same state on both before the forward",
    ),
}


def _of_forwards(case: Case) -> Finding | None:
    """A note on the ranks that have the same random numbers in most of their forwards."""
    if not case.trains_together:
        return None  # what is not averaged may be alike
    models = sorted({event.model for log in case.ranks for event in log.training_forwards})
    for what, (key, why) in _KINDS.items():
        for model in models:
            for one in case.ranks:
                alike = {
                    other.rank: figures
                    for other in case.ranks[one.rank + 1 :]
                    if (figures := _equal_forwards(key, model, one, other)) is not None
                }
                if alike:
                    same, count = next(iter(alike.values()))
                    ranks = [one.rank, *alike]
                    return Finding(
                        what=f"{name_ranks(ranks, case.world_size)} {what}.",
                        at=same[0].at,
                        ranks=ranks,
                        step=same[0].steps_done + 1,
                        why=f"{why}, so the noise does not average out over the ranks.",
                        fix=_SEED,
                        evidence=f"they are equal in {len(same)} of {count} forwards",
                        effect=f"the noise of {len(ranks)} of {case.world_size} ranks is equal",
                        is_note=True,
                    )
    return None


def _equal_forwards(
    key: Callable[[ForwardEnded], int | None], model: int, one: RankLog, other: RankLog
) -> tuple[list[ForwardEnded], int] | None:
    """The forwards with equal keys and how many have a key; None if they are no more than the half."""
    both = ([e for e in log.training_forwards if e.model == model] for log in (one, other))
    keys = [(a, key(a), key(b)) for a, b in zip(*both, strict=False) if key(a) is not None]
    same = [(a, own) for a, own, of_other in keys if own == of_other]
    # What all ranks draw once may be a constant of the training.
    if 2 * len(same) <= len(keys) or len(same) < 2:
        return None
    return [a for a, _ in same], len(keys)
