"""What the computations of a step say about the hardware. Pure: numbers of gradients in, an error out.

The numbers of a computation are those of its gradients by parameter, and of its loss. Equal numbers mean
equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.errors import PacelineError, RankDisagreement, StepError, listed, name_ranks

Numbers = dict[str, int]
LOSS = "the loss"  # among the names of gradients


def other_samples(step: int, rows: Sequence[Sequence[Any]]) -> StepError | None:
    """The error if ranks read other samples again.

    Args:
        rows: By rank: a value of its samples, of those that it read again, and of those of the next rank.
    """
    ranks = [
        rank
        for rank, row in enumerate(rows)
        if row[0] != row[1] or row[2:] not in ([], [rows[(rank + 1) % len(rows)][0]])
    ]
    if not ranks:
        return None
    return StepError(
        f"{name_ranks(ranks)} read other samples when step {step} was computed again.",
        why="the dataset, its transforms or `collate` give other values each time, on some ranks, or faulty "
        "memory has changed them.",
        fix="draw random numbers from torch, numpy or `random` with sample_randomness=True, which is the "
        "default; or leave recheck_every out.",
        step=step,
        ranks=ranks,
    )


def unstable(
    step: int, ranks: Sequence[int], everyone: Sequence[Sequence[Numbers]]
) -> PacelineError:
    """The error if ranks computed other gradients from their own samples.

    Args:
        everyone: By rank, the computations of its samples. The last one decides.
    """
    names = _differing(*everyone[ranks[0]][:2])
    what = f"step {step}, computed again, gives other gradients on {name_ranks(ranks)}"
    # A bit that hardware flipped once is not in the last computation.
    repeats = all(everyone[rank][-1] in everyone[rank][:2] for rank in ranks)
    if repeats and (len(everyone) == 1 or 2 * len(ranks) <= len(everyone)):
        return _fault(step, ranks, names, what, "its processor or memory is unstable.")
    return StepError(
        f"{what}: {listed(names)}.",
        why="the computation is not deterministic: kernels, random numbers that are not torch's, or values "
        "that the loop keeps from one micro-batch to the next. Or its processor or memory is unstable.",
        fix="torch.use_deterministic_algorithms(True); or leave recheck_every out.",
        step=step,
        ranks=ranks,
        parameters=names,
    )


def wrong(
    step: int, ranks: Sequence[int], everyone: Sequence[Sequence[Numbers]]
) -> RankDisagreement:
    """The error if the gradients of ranks are others when the rank before computes them.

    Args:
        everyone: By rank: the gradients of its samples, twice, and of those of the next rank. The last one
            decides: those of the rank after the next one, with two ranks of the next one again.
    """
    size = len(everyone)
    names: list[str] = []
    suspects: set[int] = set()
    for rank in ranks:
        before = (rank - 1) % size
        own, by_before = everyone[rank][0], everyone[before][2]
        by_judge = everyone[before if size == 2 else (rank - 2) % size][-1]
        names = names or _differing(own, by_before)
        if by_judge == own:
            suspects.add(before)
        elif by_judge == by_before and size > 2:
            suspects.add(rank)
        else:
            suspects |= set(range(size))
    end = "from the same weights and samples"
    if len(suspects) <= max(1, (size - 1) // 2):
        found = sorted(suspects)
        what = (
            f"step {step} gives other gradients on {name_ranks(found)} than on other ranks, {end}"
        )
        return _fault(step, found, names, what, "its processor or memory is faulty.")
    what = f"step {step} gives different gradients on different ranks, {end}"
    why = (
        "the forward depends on the rank, or on values that differ between ranks, such as buffers."
    )
    two = "two ranks cannot tell which of them is wrong: the processor or memory of one is faulty, or "
    return _fault(step, None, names, what, two + why if size == 2 else why)


def became_finite(step: int, ranks: list[int]) -> RankDisagreement:
    """The error if a gradient held NaN or infinity, and is finite now. `ranks` computed another loss."""
    what = f"the gradient of step {step} held NaN or infinity; computed again, it does not"
    why = f"the processor or memory of {name_ranks(ranks) if ranks else 'a rank'} is faulty."
    return _fault(step, ranks or None, [LOSS] if ranks else [], what, why)


def only_on(step: int, rank: int) -> RankDisagreement:
    """The error if a rank alone has NaN or infinity in the gradient of all ranks."""
    what = f"the gradient of step {step} holds NaN or infinity on rank {rank}, and not on all ranks, after"
    why = "the sum is equal on all ranks, unless the program has changed it on one: the memory of rank"
    return _fault(step, [rank], [], f"{what} its sum over ranks", f"{why} {rank} may be faulty.")


def _differing(one: Numbers, other: Numbers) -> list[str]:
    return [name for name, value in one.items() if value != other.get(name)]


def _fault(
    step: int, ranks: Sequence[int] | None, names: list[str], what: str, why: str
) -> RankDisagreement:
    fix = "take this host out of the job, and test it; the job resumes from its last checkpoint."
    return RankDisagreement(
        f"{what}{': ' if names else ''}{listed(names)}.",
        why=why,
        fix=fix
        if ranks
        else "compare the ranks' processors, libraries and buffers, and test the hosts.",
        parameter=names[0] if names else None,
        differing=names,
        ranks=ranks,
        step=step,
    )
