"""Whether a step of the ranks is that of one process, from the same weights, on the union of their samples.

Let g be the gradients of the ranks before the reduction, one for each backward of each rank; G what the
optimizer of the ranks got, and U what that of one process got. G is a sum of the g with some factors, 1/N
each if the ranks take the mean. If the loss of a sample does not depend on the others of its forward, U is
such a sum too, and its factors are the weights that one process gives to the samples of each backward. So the
factors of G tell what the reduction does, and those of U what the loss must weigh.

If the gradients are equal, so must be the weights and buffers that the next forward of training finds.

How much rounding and chance change is measured: by a second run of one process, in which the samples have
another order and the generators another seed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from paceline.audit.events import Clipped, CollectiveBegun, CommHookSet, Digests, full_name
from paceline.audit.evidence import RankLog, Run
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault, NotJudged
from paceline.audit.saved_weights import numbers

_EPS = torch.finfo(torch.float32).eps
# A sum of many terms is rounded by less than so many units of float32, or by so many units of a coarser type,
# whose products are added up in float32.
_UNITS, _COARSE_UNITS = 1024, 16
# The largest of many errors is less than so many times another sample of the same error.
_LARGEST = 10
# So many numbers tell a factor: not all are independent, such as the gradients of two classes.
_PER_FACTOR = 4
# Random numbers that change the gradient by a larger part hide what is compared.
_HIDDEN = 0.01

_DO_NOT_SCALE = "do not multiply or divide the loss by the number of ranks."


@dataclass(frozen=True)
class Step:
    """A step of one optimizer, as the ranks took it and as one process did.

    Attributes:
        wrong: By parameter, the relative difference of the two gradients, where it is more than rounding.
        size: The norm of the gradient of one process.
        largest: The largest relative difference of all parameters.
        noise: The relative difference between the two runs of one process.
        rounding: The relative difference that rounding explains.
        exact: The same for rounding and noise.
        after_reduction: Whether the reduced gradients are equal, and differ after what the script did then.
        ratio: The gradient of the ranks divided by that of one process; None if it is no multiple of it.
        of_ranks: The factors of the ranks' own gradients in theirs; empty if it is no such sum.
        of_one: The same in that of one process.
        backwards: The backwards of each rank.
    """

    number: int
    optimizer: int
    wrong: dict[str, float] = field(default_factory=dict)
    size: float = 0.0
    largest: float = 0.0
    noise: float = 0.0
    rounding: float = 0.0
    exact: float = 0.0
    after_reduction: bool = False
    ratio: float | None = None
    of_ranks: Sequence[float] = ()
    of_one: Sequence[float] = ()
    backwards: int = 1

    def is_near(self, value: float, other: float) -> bool:
        """Whether two numbers differ by rounding and noise only."""
        return abs(value - other) <= _LARGEST * self.exact * max(abs(value), abs(other))

    def are_equal(self, factors: Sequence[float]) -> bool:
        """Whether all factors are equal."""
        return bool(factors) and all(self.is_near(x, factors[0]) for x in factors)


def kept_steps(ordinary: Run) -> tuple[int, ...]:
    """The steps, from 0, of which an ordinary run has saved something."""
    found = ordinary.plan.folder.glob("step-*-0-*.pt")
    return tuple(sorted({int(path.name.split("-")[1]) - 1 for path in found}))


def steps_of(case: Case) -> list[Step]:
    """Every kept step that both runs took from the same weights, on the same samples."""
    if case.union is None:
        return []
    mismatch = case.mismatch
    # The step whose update made the weights differ began with equal ones.
    end = None if mismatch is None else mismatch.step + (not mismatch.outside)
    found = []
    for number in (kept + 1 for kept in kept_steps(case.ordinary)):
        if end is not None and number >= end:
            break
        buffers = [_buffers(log, number - 1) for log in case.ranks]
        if any(own != buffers[0] for own in buffers):
            continue
        if not _has_same_samples(case, case.union, number - 1):
            continue
        for optimizer in range(len(case.union.ranks[0].optimizer_steps(number))):
            ranks = _saved_by_all(case, number, optimizer)
            one = _saved(case.union, number, optimizer, 0)
            null = _saved(case.null, number, optimizer, 0) if case.null else one
            if one and null and ranks and not one["is_coupled"]:
                step = _compare(Step(number, optimizer), ranks, one, null)
                found += [] if step is None else [step]
    return found


def _has_same_samples(case: Case, union: Run, done: int) -> bool:
    """Whether the union had the samples of all ranks after so many steps."""
    one = _batches(union.ranks[0], done)
    of_ranks = [_batches(log, done) for log in case.ranks]
    if not any(of_ranks):
        expected = Counter(row for log in case.ranks for row in _rows(log, done))
        return bool(expected) and expected == Counter(_rows(union.ranks[0], done))
    if not union.plan.one_by_one:
        return set(one) == {each for own in of_ranks for each in own}
    firsts = [(own[0].loader, own[0].number) for own in (one, of_ranks[0]) if own]
    counts = len(one), sum(map(len, of_ranks))
    places = (
        one[0].place if one else 0,
        of_ranks[0][0].place * case.world_size if of_ranks[0] else 0,
    )
    return len(set(firsts)) == 1 and counts[0] == counts[1] and places[0] == places[1]


class _Batch(NamedTuple):
    loader: str
    number: int  # of the pass
    place: int  # in the pass


def _batches(log: RankLog, done: int) -> list[_Batch]:
    """The training batches that a rank got after so many steps."""
    return [
        _Batch(*key, place)
        for key, own in log.passes.items()
        if key[0] in log.training_loaders
        for place, batch in enumerate(own.batches)
        if batch.steps_done == done
    ]


def _buffers(log: RankLog, done: int) -> list[Digests]:
    """The buffers of the models in training, after so many steps."""
    return [event.buffers for event in log.training_forwards if event.steps_done == done]


def _rows(log: RankLog, done: int) -> list[int]:
    """The inputs of models in training, after so many steps."""
    forwards = (event for event in log.training_forwards if event.steps_done == done)
    return [row for event in forwards for row in event.rows or ()]


def _saved(run: Run, step: int, optimizer: int, rank: int) -> Any:
    """What a rank saved of a step; None if it did not take it."""
    path = run.plan.folder / f"step-{step}-{optimizer}-{rank}.pt"
    return torch.load(path, weights_only=True) if path.exists() else None


def _saved_by_all(case: Case, step: int, optimizer: int) -> list[Any]:
    """What the ranks saved of a step; empty if one of them did not take it."""
    found = [_saved(case.ordinary, step, optimizer, rank) for rank in range(case.world_size)]
    return found if all(found) else []


def _compare(step: Step, ranks: list[Any], one: Any, null: Any) -> Step | None:
    """Compare what the optimizers got in a step; None if one process has other shapes, or no finite numbers.

    If it differs, so may what was there before the script changed it, such as by clipping.
    """
    for key in ("final", "reduced"):
        parts = _whole(ranks, key), _whole([one], key), _whole([null], key)
        eps = max(own["eps"] for own in (*ranks, one))
        compared = _with_differences(step, parts, eps)
        if compared is None or not compared.wrong:
            return compared if key == "final" else step
        step = replace(compared, after_reduction=key == "final")
        got, want = (torch.cat([part[n] for n in compared.wrong]) for part in parts[:2])
        step = _with_factors(step, ranks, got, want)
    return step


def _with_differences(
    step: Step, parts: tuple[dict[str, torch.Tensor], ...], eps: float
) -> Step | None:
    """The step with the differences between the ranks, one process and the null run; None as above."""
    got, want, other = parts
    for a, b in ((got, want), (want, got), (other, want)):
        a |= {name: torch.zeros_like(b[name]) for name in b.keys() - a.keys()}
    size = _norm(want.values())
    if any(got[n].shape != want[n].shape for n in want) or not math.isfinite(size):
        return None
    rounding = max(_UNITS * _EPS, _COARSE_UNITS * eps if eps > _EPS else 0.0)
    noise = _norm(other[n] - want[n] for n in want) / size if size else 0.0
    exact = max(rounding, _LARGEST * noise)
    largest, wrong = 0.0, {}
    for name, wanted in want.items():
        scale = max(_norm([wanted]), _norm([got[name]]))
        if scale <= max(_UNITS * _EPS, eps) * size:
            continue  # it is rounding itself
        difference = _norm([got[name] - wanted]) / scale
        # Of few numbers, the noise may be small by chance.
        allowed = max(exact, _LARGEST * _norm([other[name] - wanted]) / scale)
        largest = max(largest, difference)
        if not difference <= allowed:  # also if a number is not finite
            wrong[name] = difference
    return replace(
        step, size=size, noise=noise, rounding=rounding, exact=exact, largest=largest, wrong=wrong
    )


def _whole(ranks: list[Any], key: str) -> dict[str, torch.Tensor]:
    """The gradients, flat: of sharded ones the parts of all ranks, of others that of the first rank with it.

    Each rank may update other parameters, as with ZeroRedundancyOptimizer.
    """
    found: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name in rank[key].keys() - found.keys():
            dimension = rank["dimensions"][name]
            parts = [each[key][name] for each in ranks if name in each[key]]
            found[name] = (parts[0] if dimension is None else torch.cat(parts, dimension)).flatten()
    return dict(sorted(found.items()))


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The norm of the difference, where equal infinite numbers count as 0."""
    return _norm([torch.where(one == other, 0.0, one - other)])


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return float(sum(float(each.norm()) ** 2 for each in tensors) ** 0.5)


def _with_factors(step: Step, ranks: list[Any], got: torch.Tensor, want: torch.Tensor) -> Step:
    """The step with the factors of its wrong gradients."""
    if not bool(torch.cat([got, want]).isfinite().all()):
        return step
    ratio = _factors(want[None], got, step.exact)
    rows = _own(ranks, list(step.wrong))
    return replace(
        step,
        ratio=ratio[0] if ratio else None,
        # Chance does not change these: both sides are of one run.
        of_ranks=_factors(rows, got, step.rounding),
        of_one=_factors(rows, want, step.exact),
        backwards=len(rows) // len(ranks),
    )


def _own(ranks: list[Any], names: list[str]) -> torch.Tensor:
    """The ranks' own gradients, a row for each backward of each rank.

    No rows if they are not known, or if the ranks have different numbers of backwards.
    """
    shapes = {n: each for rank in ranks for n in names for each in rank["own"].get(n, {}).values()}
    numbers = [sorted({k for n in names for k in rank["own"].get(n, {})}) for rank in ranks]
    if shapes.keys() != set(names) or len({len(own) for own in numbers}) > 1:
        return torch.empty(0, 0)
    rows = [
        torch.cat(
            [rank["own"].get(n, {}).get(k, torch.zeros_like(shapes[n])).flatten() for n in names]
        )
        for rank, own in zip(ranks, numbers, strict=True)
        for k in own
    ]
    return torch.stack(rows)


def _factors(rows: torch.Tensor, target: torch.Tensor, exact: float) -> list[float]:
    """The factors of the rows whose sum is the target, by least squares.

    Empty if a larger part of the target is left, or if it has too few numbers to tell.
    """
    if not len(rows) or len(target) < _PER_FACTOR * len(rows) or exact > _HIDDEN:
        return []
    factors = torch.linalg.pinv(rows @ rows.T, hermitian=True) @ (rows @ target)
    norms = rows.norm(dim=1)
    is_known = norms > exact * norms.max()
    factors[~is_known] = factors[is_known].mean()  # a gradient of 0 has any factor
    is_sum = _norm([factors @ rows - target]) <= exact * _norm([target])
    return [float(x) for x in factors] if is_sum else []


class Result(NamedTuple):
    """A weight or buffer after a step, as the next forward of training finds it."""

    step: int
    name: str
    is_buffer: bool
    difference: float  # relative to what the step has changed
    is_wrong: bool  # whether it is more than rounding and noise


def results_of(case: Case, steps: Sequence[Step]) -> list[Result]:
    """What compared steps have made of weights and buffers, until the ranks' weights differ.

    Weights after the first two steps only: later, the state of the optimizer has another history.
    """
    union, null, mismatch = case.union, case.null or case.union, case.mismatch
    if union is None or null is None:
        return []
    found = []
    for number in sorted({step.number for step in steps}):
        if mismatch is not None and number >= mismatch.step:
            break
        of_step = [step for step in steps if step.number == number]
        rounding = max(step.rounding for step in of_step)
        rates = [
            [event.lrs for event in run.ranks[0].optimizer_steps(number)]
            for run in (case.ordinary, union)
        ]
        known = _known_gradients(union, of_step) if number <= 2 else {}
        for path in sorted(union.plan.folder.glob(f"result-{number}-*-0.pt")):
            model = int(path.stem.removeprefix(f"result-{number}-").removesuffix("-0"))
            ends = [_read(run, f"result-{number}-{model}") for run in (case.ordinary, union, null)]
            begin = _read(case.ordinary, f"state-{number - 1}-{model}")
            if not all((*ends, begin)):
                continue
            got, want, other = (_whole(each, "numbers") for each in ends)
            buffers = {full_name(model, name) for name in ends[0][0]["buffers"]}
            for own, value in want.items():
                name = full_name(model, own)
                if own not in begin[0] or own not in got or got[own].shape != value.shape:
                    continue
                is_buffer = name in buffers
                if not is_buffer and name not in known:
                    continue
                taken = slice(None) if is_buffer else known[name]
                before, eps = _before(begin, own)
                x, y, z, start = (each[taken] for each in (got[own], value, other[own], before))
                change = max(_distance(y, start), _distance(x, start))
                if not change:
                    continue
                difference, noise = _distance(x, y), _distance(z, y)
                finite = y[y.isfinite()]
                allowed = max(rounding * change, _LARGEST * noise) + eps * _norm([finite])
                is_wrong = not difference <= allowed
                # Another learning rate may be a choice: only equal weights tell then.
                if is_buffer or not is_wrong or rates[0] == rates[1]:
                    found.append(Result(number, name, is_buffer, difference / change, is_wrong))
    return found


def _known_gradients(union: Run, steps: Sequence[Step]) -> dict[str, torch.Tensor]:
    """By parameter, which numbers of its gradient are more than rounding and noise.

    Of others, an optimizer such as Adam makes a step of any sign.
    """
    known = {}
    for step in steps:
        gradients = _whole([_saved(union, step.number, step.optimizer, 0)], "final")
        least = _UNITS * _EPS * _norm(gradients.values())
        for name, gradient in gradients.items():
            if gradient.norm() > least:
                known[name] = gradient.abs() > step.exact * gradient.norm()
    return known


def _read(run: Run, name: str) -> list[Any]:
    """What the ranks saved under this name."""
    paths = [run.plan.folder / f"{name}-{rank}.pt" for rank in range(run.plan.world_size)]
    return [torch.load(path, weights_only=True) for path in paths if path.exists()]


def _before(begin: list[Any], name: str) -> tuple[torch.Tensor, float]:
    """The saved numbers of a weight or buffer, and the resolution of its type."""
    dimension, first = begin[0][name]
    if dimension is None:
        values = numbers(first)
    else:
        values = torch.cat([each[name][1] for each in begin if name in each], dimension).double()
    return values.flatten(), torch.finfo(first.dtype).eps


def step_of_one_process(case: Case) -> Judgement:
    """What the optimizer of the ranks got is what that of one process got, and so is what it made of it."""
    steps = steps_of(case)
    results = results_of(case, steps)
    wrong = [] if case.optimizer_exchanges else [step for step in steps if step.wrong]
    if wrong:
        count = f"in {len(wrong)} of {len(steps)} compared steps"
        of_first = [step for step in wrong if step.number == wrong[0].number]
        judged = [_explain_with_results(case, step, results, count) for step in of_first]
        # A fault rather than a note, and a note rather than what is not judged.
        return min(judged, key=lambda each: each.is_note if isinstance(each, Finding) else 2)
    if any(result.is_wrong for result in results):
        return _changed(case, [result for result in results if result.is_wrong])
    if case.optimizer_exchanges and all(result.is_buffer for result in results):
        return NotJudged(
            "the optimizer exchanges values between the ranks: its gradient is a rank's own."
        )
    if not steps:
        why = case.why_no_union or case.why_no_steps
        return _reduction_alone(
            case, why or "one process could not be given the samples of the ranks."
        )
    if not any(step.size for step in steps):
        return NotJudged("the gradients of the compared steps are 0.")
    noise = max(step.noise for step in steps)
    if noise > _HIDDEN:
        return _reduction_alone(
            case,
            f"random numbers change the gradient by up to {noise:.0%}, and it differs from that of one "
            "process by no more than they explain.",
        )
    shown = ", ".join(str(number) for number in sorted({step.number for step in steps}))
    of_gradients = 0.0 if case.optimizer_exchanges else max(step.largest for step in steps)
    return NoFault(
        f"compared steps: {shown}. The optimizer gets the gradient of one process; the largest difference is "
        f"{of_gradients:.2g} of its norm. {len(results)} weights and buffers after a step are those of one "
        "process."
    )


def _explain_with_results(
    case: Case, step: Step, results: Sequence[Result], count: str
) -> Judgement:
    """What is known of a step whose gradient differs; a note if the weights after it do not."""
    found = _explain(case, step, count)
    equal = {each.name for each in results if each.step == step.number and not each.is_wrong}
    if not isinstance(found, Finding) or not step.wrong.keys() <= equal:
        return found
    # The optimizer may divide it, or be one for which its scale has no effect, such as Adam.
    evidence = f"{found.evidence}. The weights after the step are those of one process"
    return replace(found, evidence=evidence, is_note=True)


def _changed(case: Case, wrong: list[Result]) -> Finding:
    """The finding for weights or buffers that a step makes other than one process does."""
    first = max(
        (each for each in wrong if each.step == wrong[0].step), key=lambda each: each.difference
    )
    why = "the gradients are those of one process. The optimizer, or what changes the weights after it, "
    why += "depends on the number of processes, or on values of one rank."
    if first.is_buffer:
        why = "it is computed from values of one rank, or from other values than one process has. DDP sends "
        why += "the buffers of rank 0 to all others, so that the ranks agree."
    return Finding(
        what=f"after step {first.step}, {first.name} is not that of one process.",
        at=case.ranks[0].optimizer_steps(first.step)[0].at,
        step=first.step,
        why=why,
        fix="compute it from the values of all ranks, such as sums and counts that are all_reduced.",
        evidence=f"from equal weights and the same samples, its change differs by {first.difference:.2%}",
        effect=f"{len({each.name for each in wrong})} weights and buffers differ by up to "
        f"{max(each.difference for each in wrong):.2%} of their change",
        is_note=True,
    )


def _reduction_alone(case: Case, why: str) -> Judgement:
    """Without a step of one process: whether the optimizer got the mean of the ranks' gradients."""
    for number in (kept + 1 for kept in kept_steps(case.ordinary)):
        ranks = _saved_by_all(case, number, 0)
        reduced = _whole(ranks, "reduced") if ranks else {}
        if not reduced or any(dim is not None for dim in ranks[0]["dimensions"].values()):
            continue
        rows = _own(ranks, list(reduced))
        step = Step(number, 0, rounding=_UNITS * _EPS, exact=_UNITS * _EPS)
        factors = _factors(rows, torch.cat(list(reduced.values())), step.exact) if len(rows) else []
        step = replace(step, of_ranks=factors, backwards=len(rows) // len(ranks))
        evidence = (
            f"{why} The ranks' own gradients have the factors {_listed(factors)} in what it gets"
        )
        if factors and not step.are_equal(factors):
            return _not_reduced(case, step, evidence)
        if factors and step.is_near(factors[0], 1.0):
            return _finding(
                case,
                step,
                "the optimizer gets the sum of the ranks' gradients, and not their mean.",
                why="that is right only if the loss of a rank is divided by the samples of all ranks.",
                fix="divide by the number of ranks after the all_reduce, or let DDP take the mean.",
                evidence=evidence,
                is_note=True,
            )
    return NotJudged(why)


def _explain(case: Case, step: Step, steps: str) -> Judgement:
    """What is known of the first step that differs."""
    name, most = max(step.wrong.items(), key=lambda each: each[1])
    evidence = (
        f"{steps}; in step {step.number} the gradient of {name} differs by {most:.2%} of its norm"
    )
    if step.of_ranks:
        evidence += f". The ranks' own gradients have the factors {_listed(step.of_ranks)} in it"
    if step.of_one:
        evidence += f", and {_listed(step.of_one)} in that of one process"
    if step.noise > _UNITS * _EPS:
        evidence += f". Random numbers and rounding change it by {step.noise:.2g}"
    if step.after_reduction:
        return _finding(
            case,
            step,
            "after the reduction, the script changes the gradient in another way than on one process.",
            why="the reduced gradient is that of one process. What is done with it then (clipping, scaling) "
            "depends on the number of processes, or on the part of it that a rank holds.",
            fix="clip and scale it alike on all ranks, by values of the whole gradient.",
            evidence=evidence,
            # Later, it may depend on what the script has kept since, such as a mean of norms.
            is_note=step.number > 1,
        )
    if step.ratio is not None and not step.is_near(step.ratio, 1.0):
        return _multiple(case, step, step.ratio, evidence)
    if step.of_ranks and not step.are_equal(step.of_ranks):
        return _not_reduced(case, step, evidence)
    if step.of_ranks and step.of_one and not step.are_equal(step.of_one):
        mean = sum(step.of_one) / len(step.of_one)
        sizes = [
            [(b.loader, b.samples) for b in log.training_batches if b.steps_done == step.number - 1]
            for log in case.ranks
        ]
        starts = range(0, len(step.of_one), step.backwards)
        of_ranks = [step.of_one[i : i + step.backwards] for i in starts]
        return _finding(
            case,
            step,
            "a mean of means: samples have other weights than on one process.",
            why="the ranks or micro-batches have different numbers of terms, and their means get the same "
            f"weight. On one process they have the weights {_listed([x / mean for x in step.of_one])}.",
            fix="divide the sum of the losses by the number of terms of the whole step, on all ranks. With "
            "DDP, multiply by the number of ranks, since it takes the mean.",
            evidence=evidence,
            # Between batches of equal size, the terms of a sample differ by chance, such as its tokens.
            is_note=all(own == sizes[0] for own in sizes) and all(map(step.are_equal, of_ranks)),
        )
    if any(log.of(CommHookSet) for log in case.ranks):
        return NotJudged(f"a communication hook of DDP changes the gradient; {evidence}.")
    why = "the loss compares samples of a forward or draws random numbers for them, or the ranks compute it "
    why += "from other values than one process."
    if not step.of_ranks:
        why = "the ranks' own gradients do not add up to it, or are not known."
    return _finding(
        case,
        step,
        "the gradient is not that of one process on the same samples; the cause is not known.",
        why=why,
        fix="compare the loss and the gradient of this step on one and on several processes.",
        evidence=evidence,
        is_note=True,
    )


def _multiple(case: Case, step: Step, ratio: float, evidence: str) -> Judgement:
    """The gradient of the ranks is a multiple of that of one process."""
    count = case.world_size
    what = f"the gradient is {ratio:.4g} times that of one process on the same samples"
    why, fix = (
        "what is done with the loss or the gradient depends on the number of processes.",
        _DO_NOT_SCALE,
    )
    is_note = False
    is_mean = bool(step.of_ranks) and step.is_near(step.of_ranks[0], 1 / count)
    if step.is_near(ratio, count) and is_mean:
        what += ": the loss is multiplied by the number of ranks."
    elif step.is_near(ratio, count):
        what += ": it is summed over the ranks, and not averaged."
        fix = "divide by the number of ranks after the all_reduce, or let DDP take the mean."
    elif step.is_near(ratio, 1 / count):
        what += ": the mean over the ranks divides it again."
        why = "the loss is divided by the number of ranks, or by the samples of all of them."
        fix = "do not divide the loss by the number of ranks; if it is a sum divided by the samples of all "
        fix += "ranks, multiply it by the number of ranks."
        alone = _scale_alone(case, step)
        # A sum that is divided by a constant batch size is the mean of a rank.
        if alone is None or step.is_near(alone, 1.0) or not is_mean:
            is_note = True
            why = "on one process it grows with the number of samples: the loss is a sum over them, or "
            why += "contains values of other ranks that have no gradient."
            fix = "take a mean over the samples, or multiply the loss by the number of ranks."
    return _finding(case, step, what, why=why, fix=fix, evidence=evidence, is_note=is_note)


def _scale_alone(case: Case, step: Step) -> float | None:
    """One process's gradient of rank 0's samples, divided by rank 0's own; None if it is no multiple."""
    saved = [
        _saved(run, step.number, step.optimizer, 0) for run in (case.ordinary, case.alone) if run
    ]
    rows = [_own([each], list(step.wrong)) for each in saved if each]
    if len(rows) < 2 or not all(map(len, rows)):
        return None
    own, alone = (each.sum(0) for each in rows)
    factors = _factors(own[None], alone, step.exact)
    return factors[0] if factors else None


def _not_reduced(case: Case, step: Step, evidence: str) -> Judgement:
    """The gradients of some ranks or micro-batches have other factors than those of the others."""
    mismatch = case.mismatch
    others = step.of_ranks[step.backwards :]
    alone = all(abs(x) <= step.exact * max(map(abs, step.of_ranks)) for x in others)
    if (
        alone
        and mismatch is None
        and any(isinstance(e, Clipped) for e in case.ranks[0].first_update.calls)
    ):
        return _finding(
            case,
            step,
            "each rank clips its own gradient before the reduction.",
            why="the norm of one rank's gradient is not that of the mean over the ranks.",
            fix="clip after the all_reduce, when all ranks have the same gradient.",
            evidence=evidence,
        )
    return _finding(
        case,
        step,
        f"the gradient{'' if alone else ' of some micro-batches'} is not reduced: each rank has its own.",
        why="DDP reduces in the backward after a forward of the wrapped model outside of `no_sync`, and only "
        "the parameters that it was built with.",
        fix="wrap the whole model, and run the forward and backward of the last micro-batch of each step "
        "outside of `no_sync`; or all_reduce each gradient before the step.",
        evidence=evidence,
        # The script may make the weights equal again, be it after the watched steps (local SGD).
        is_note=mismatch is None or mismatch.is_restored or not case.trains_together,
    )


def _finding(
    case: Case, step: Step, what: str, *, why: str, fix: str, evidence: str, is_note: bool = False
) -> Finding:
    effect = "not known without a run of one process"
    if step.wrong:
        effect = f"{len(step.wrong)} gradients differ by up to {max(step.wrong.values()):.2%}"
    return Finding(
        what=what,
        at=_line(case),
        step=step.number,
        why=why,
        fix=fix,
        evidence=evidence,
        effect=effect,
        is_note=is_note,
    )


def _line(case: Case) -> str:
    """The line of a reduction by hand in the first update; without one, of the first backward."""
    log = case.ranks[0]
    begun = False
    for event in log.events:
        begun |= event is log.first_backward
        if begun and isinstance(event, CollectiveBegun) and event.op in ("all_reduce", "reduce"):
            return event.at
        if event in log.first_update.calls:
            break
    return log.first_backward.at


def _listed(factors: Sequence[float]) -> str:
    shown = [f"{0 if abs(x) < _EPS else x:.3g}" for x in factors]
    return f"[{', '.join(shown)}]" if factors else "no"
