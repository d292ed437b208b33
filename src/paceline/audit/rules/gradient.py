"""Whether the gradient of N ranks is that of one process. What is compared depends on the replay:

    replay                                  off by a factor               not that of one process
    mirrored: ranks have the same samples   norm; each tensor's factor    each tensor
    divided: ranks have parts of them       norm                          direction, if values are gathered
    none                                    weight of all the samples     -

A factor is found also with dropout, and for each optimizer. The other comparison needs equal random numbers,
and takes the first optimizer only.
"""

from __future__ import annotations

import math
from itertools import dropwhile, takewhile

import torch

from paceline.audit.events import (
    BackwardBegun,
    Clipped,
    CollectiveBegun,
    CollectiveEnded,
    CommHookSet,
    DDPBuilt,
    Digests,
    OptimizerStepBegun,
    OwnFileRead,
    SeedSet,
    StateLoaded,
)
from paceline.audit.evidence import RankLog, Run
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault, NotJudged

# Rounding and BatchNorm change the ratio by less; a wrong factor is 2 or more.
# Four times as much changes broken/89_penalty and sound/69_tokens_weighted.
_EQUAL = 0.02
# A ratio whose relative distance to N or 1/N is smaller counts as that factor, and so does a learning rate.
# See broken/05_closure.
_NEAR_FACTOR = 0.05
# On the same samples, a gradient that differs by a larger part is not that of one process.
# See broken/05_gradient_of_one_layer.
_DIFFERENT = 0.05
# With dropout or BatchNorm, the gradient of the parts of a batch differs from that of the whole by less.
_NOISE_OF_PARTS = 0.25
# The ranks have equal shares in the gradient if these differ by less.
_EQUAL_SHARES = 0.02
# Without a replay, the weights of samples that differ by less may be of other samples.
_OTHER_SAMPLES = 1.5
# Below this cosine the two gradients differ by more than a factor. See broken/05_closure.
_SAME_DIRECTION = 0.98
# Above this cosine a gradient is a multiple of another one, if it has enough values to tell.
# A quarter changes broken/18_checkpoint_on_rank0 and broken/89_penalty.
_MULTIPLE = 0.9999
_MIN_VALUES = 8
# Before the reduction, a rank's gradient that differs by a smaller part is that of one process.
_SAME_GRADIENT = 0.02
# Gradients with a smaller part of the norm of the whole one may be rounding alone (broken/89_penalty).
_SMALL_PART = 1e-3
# The ranks' losses of one batch are equal if they differ by less than this part of the larger one, or by less
# than the second number. See sound/82_centre.
_EQUAL_LOSS, _ZERO_LOSS = 1e-5, 1e-6
# A difference by less than this part is no fault of its own (broken/66_class_weights).
_SAME_LOSS = 1e-3

_NOT_FINAL = NotJudged(
    "the optimizer exchanges values between the ranks, so the gradient that it uses was not seen."
)
_NO_GRADIENT = NotJudged("the gradient of step 1 was 0, or belonged to different parameters.")


def scaled_gradient(case: Case) -> Judgement:
    """The gradient of N ranks on the samples of one process is a multiple of that of one, often N or 1/N."""
    if case.optimizer_exchanges:
        return _NOT_FINAL
    run = case.replay
    why = case.why_no_replay if run is None else _why_not_comparable(case, run.ranks)
    if run is None or why:
        return _scale_by_loss_weight(case, why)
    optimizers = max(1, len(case.solo.ranks[0].optimizer_steps(1)))
    judgements = [_judge_optimizer(case, run, number) for number in range(optimizers)]
    # After the first, a gradient may depend on random numbers since its forward, which do not only scale it.
    return next(
        (judgement for judgement in judgements if isinstance(judgement, Finding)), judgements[0]
    )


def _judge_optimizer(case: Case, run: Run, number: int) -> Judgement:
    """Compare the gradients of step 1 that an optimizer got with those in the run of one process.

    Args:
        number: 0 for the optimizer that stepped first.
    """
    one, other = case.solo.gradients(number), run.gradients(number)
    compared = _sizes_and_cosine(one, other)
    if compared is None:
        return _NO_GRADIENT
    size, other_size, cosine = compared
    clips = [_clip(each.ranks[0], number) for each in (case.solo, run)]
    norms = [clip.norm for clip in clips if clip is not None and clip.norm]
    if len(norms) == len(clips):
        size, other_size = norms  # clipping gives both the same norm
    ratio = other_size / size
    optimizers = len(case.solo.ranks[0].optimizer_steps(1))
    whose = "the gradient" if optimizers < 2 else f"the gradient of optimizer {number + 1}"
    figure = f"{whose} of step 1 was {ratio:.4g} times that of one process on the same samples"
    judgement = _judge_ratio(case, ratio, figure, same_direction=cosine > _SAME_DIRECTION)
    if isinstance(judgement, Finding):
        return judgement
    first = run.ranks[0].first_forward
    depends_on_parts = first.buffers or first.drew
    if run.plan.mode == "divided" and depends_on_parts and abs(ratio - 1) < _NOISE_OF_PARTS:
        return NoFault(f"{figure}; with dropout or BatchNorm, that of its parts differs a little.")
    if run.plan.mode == "divided":
        return judgement
    log = run.ranks[0]
    gathers = (isinstance(e, CollectiveBegun) and "gather" in e.op for e in log.before_backward)
    can_tell = clips[1] is None and not any(gathers)
    return (_wrong_multiple(one, other, log) if can_tell else None) or judgement


def _sizes_and_cosine(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]
) -> tuple[float, float, float] | None:
    """The norms of two gradients and the cosine between them; None if one is 0 or of other parameters."""
    vectors = _flat(one), _flat(other)
    size, other_size = (float(each.norm()) for each in vectors)
    if one.keys() != other.keys() or not size or not other_size:
        return None
    return size, other_size, float(vectors[0] @ vectors[1]) / (size * other_size)


def _flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([*gradients.values(), torch.empty(0)])


def _clip(log: RankLog, number: int) -> Clipped | None:
    """The first clipping of gradients that an optimizer got in step 1."""
    step = next(iter(log.optimizer_steps(1)[number:]), OptimizerStepBegun())
    before = takewhile(lambda event: event is not step, log.events)
    clips = (event for event in before if isinstance(event, Clipped))
    return next((clip for clip in clips if step.grads.keys() & clip.names), None)


def _judge_ratio(case: Case, ratio: float, figure: str, *, same_direction: bool) -> Judgement:
    count = case.world_size
    if abs(ratio - 1) < _EQUAL:
        return NoFault(figure + ".")
    for factor in (count, 1 / count):
        if abs(ratio / factor - 1) < _NEAR_FACTOR and same_direction:
            return _scale_fault(case, factor > 1, figure)
    is_open = case.replay is None or not _own_generators_differ(case.replay)
    return NotJudged(f"{figure}, which is neither {count} nor 1/{count}.", is_open=is_open)


def _wrong_multiple(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], log: RankLog
) -> Finding | None:
    """Some gradients are wrong multiples of those of one process, and all are multiples of them.

    Different random numbers or samples do not only scale a gradient.
    """
    factors = {}
    for name, a in one.items():
        b = other[name]
        norms = float(a.norm()), float(b.norm())
        if len(a) >= _MIN_VALUES and all(norms):
            if float(a @ b) < _MULTIPLE * norms[0] * norms[1]:
                return None
            factors[name] = norms[1] / norms[0]
    wrong = {name: factor for name, factor in factors.items() if abs(factor - 1) > _DIFFERENT}
    if not wrong:
        return None
    name, factor = max(wrong.items(), key=lambda each: abs(math.log(each[1])))
    return Finding(
        what=f"the gradient of {name} is {factor:.4g} times that of one process.",
        at=(_manual_reduction(log) or log.first_backward).at,
        step=1,
        why="the ranks had the samples of one process, so the mean over the ranks is its gradient.",
        fix="take the mean over the ranks of every gradient, and do not scale the loss by their number.",
        evidence=f"{len(wrong)} of {len(factors)} gradients are multiples of those of one process",
        effect=f"the gradient of {name} is off by a factor of {factor:.3g}",
    )


def _scale_by_loss_weight(case: Case, why: str) -> Judgement:
    """Compare the total weight of the samples of step 1, for samples that cannot be replayed."""
    if case.ordinary.ranks[0].gather_for_loss is not None:
        return NotJudged("the loss is one of gathered values, and not all need to have a gradient.")
    solo, ordinary = _weight_in_gradient(case.solo), _weight_in_gradient(case.ordinary)
    if not solo or not ordinary:
        return NotJudged(why)
    ratio = ordinary / solo
    figure = f"the samples of step 1 have {ratio:.4g} times the weight of those of one process"
    judgement = _judge_ratio(case, ratio, figure, same_direction=True)
    if isinstance(judgement, NotJudged) and 1 / _OTHER_SAMPLES < ratio < _OTHER_SAMPLES:
        return NotJudged(
            f"{judgement.why[:-1]}; different samples may have different numbers of terms."
        )
    return judgement


def _weight_in_gradient(run: Run) -> float | None:
    """The weight of all terms of the losses of step 1 in the gradient that the optimizer gets."""
    share = share_of_each_rank(run)
    backwards = [event for log in run.ranks for event in log.first_update.backwards]
    is_clipped = _clip(run.ranks[0], 0) is not None and not run.ranks[0].of(DDPBuilt)
    if share is None or is_clipped or not all(event.terms for event in backwards):
        return None
    return share * sum(event.total_weight for event in backwards)


def share_of_each_rank(run: Run) -> float | None:
    """The factor of each rank's gradient of step 1 in that of the optimizer; None if unknown or unequal."""
    if run.ranks[0].of(DDPBuilt):
        return None if run.ranks[0].of(CommHookSet) else 1 / len(run.ranks)
    final = run.gradients()
    gradients = [run.local_gradients(log.rank) for log in run.ranks]
    if not final or not all(final.keys() <= gradient.keys() for gradient in gradients):
        return None
    rows = [_flat({name: gradient[name] for name in final}) for gradient in gradients]
    if any(len(row) != len(_flat(final)) for row in rows):
        return None  # shards
    matrix = torch.stack(rows)
    # Least squares; for equal gradients, the pseudo-inverse gives equal shares.
    shares = torch.linalg.pinv(matrix @ matrix.T) @ (matrix @ _flat(final))
    is_one = float(shares.max() - shares.min()) < _EQUAL_SHARES * float(shares.abs().max())
    return float(shares.mean()) if is_one else None


def _scale_fault(case: Case, larger: bool, figure: str) -> Finding:
    log, count = case.ranks[0], case.world_size
    steps = [step for each in (case.solo.ranks[0], log) for step in each.optimizer_steps(1)[:1]]
    is_compensated = False  # the update of SGD is right if its rate is N times smaller
    if larger and len(steps) == 2:
        solo_rate, rate = (step.lrs[0] for step in steps)
        is_compensated = math.isclose(solo_rate, rate * count, rel_tol=_NEAR_FACTOR)
        is_compensated &= steps[1].is_sgd
    if larger:
        reduction = _manual_reduction(log)
        why = "it is summed over ranks and not averaged."
        fix = "divide by the number of ranks after the all_reduce, or let DDP take the mean."
        if reduction is None and (log.of(DDPBuilt) or "data" in log.layouts):
            whose = "FSDP" if "data" in log.layouts else "DDP"
            why = "the loss is multiplied by the number of ranks."
            fix = f"do not multiply it: {whose} takes the mean over the ranks, as the loss does over samples."
    else:
        why, fix, reduction = _cause_of_small(case)
    return Finding(
        what=f"the gradient is {count} times too {'large' if larger else 'small'}: {why}",
        at=(reduction or log.first_backward).at,
        step=1,
        why="the effective learning rate depends on the number of processes.",
        fix=fix,
        evidence=figure,
        effect=f"the gradient is off by a factor of {count if larger else 1 / count:.3g}"
        + ", and the learning rate makes up for it" * is_compensated,
        # A sum over all samples grows with their number, on one process too (sound/95_pipeline_by_hand).
        is_note=is_compensated or (larger and _is_sum(case.solo.ranks[0].first_backward)),
    )


def _is_sum(loss: BackwardBegun) -> bool:
    """Whether each sample has the weight 1 in the loss, however many there are."""
    return loss.terms > 1 and math.isclose(loss.term_weight, 1.0)


def _cause_of_small(case: Case) -> tuple[str, str, CollectiveBegun | None]:
    """Why the gradient is N times too small, the fix, and the line if it is not that of the backward."""
    log = (case.replay or case.ordinary).ranks[0]
    solo, own = case.solo.ranks[0].first_backward, log.first_backward
    for event in log.in_first_batch:
        values = event.values if isinstance(event, CollectiveBegun | CollectiveEnded) else None
        # The weight of a term in the loss is one divided by a number that all ranks have summed.
        if any(math.isclose(x * own.term_weight, 1.0, rel_tol=1e-4) for x in values or ()):
            why = "the loss is divided by a sum over all ranks, and the mean over ranks divides again."
            return why, "multiply the loss by the number of ranks.", None
    gather = log.gather_for_loss
    if gather is not None and not 0 < own.total_weight < solo.total_weight / 1.5:
        why = "what is gathered from other ranks has no gradient."
        fix = "gather with torch.distributed.nn.functional.all_gather, whose backward sums the gradients "
        return why, fix + "of all ranks, or multiply the loss by their number.", gather
    why = "it is divided by the number of ranks twice."
    is_fsdp = "data" in log.layouts
    if not is_fsdp and not log.of(DDPBuilt):
        return why, "divide it once.", None
    whose = "FSDP" if is_fsdp else "DDP"
    fix = f"do not divide the loss by the number of ranks: {whose} already averages the gradients."
    return why, fix, None


def _manual_reduction(log: RankLog) -> CollectiveBegun | None:
    """An all_reduce between the first backward and the end of the first update."""
    update = log.first_update
    after = dropwhile(lambda event: event not in update.backwards, log.events)
    last = [*update.backwards, *update.calls][-1:]
    for event in takewhile(lambda event: event not in last, after):
        if isinstance(event, CollectiveBegun) and event.op in ("all_reduce", "reduce"):
            return event
    return None


def _why_not_comparable(case: Case, replayed: list[RankLog]) -> str:
    """Why the first steps of solo run and replay cannot be compared; empty if they can."""
    first, other = case.solo.ranks[0].first_forward, replayed[0].first_forward
    if first.params is None or other.params is None:
        return "no forward of training was seen."
    if first.params != other.params and not replayed[0].layouts:
        seeds = (run.ranks[0].of(SeedSet) for run in (case.solo, case.ordinary))
        why = "" if any(seeds) else ": no call of torch.manual_seed was seen"
        own = replayed[0].first(OwnFileRead)
        if own is not None and replayed[0].first(StateLoaded):
            why = f": {own.path}, which an earlier run of verification wrote, is read at {own.at}"
        return f"the weights differ between two runs before the first step{why}."
    if not case.has_same_inputs:
        return "step 1 has other inputs than on one process, such as random ones or fewer micro-batches."
    return ""


def different_gradient(case: Case) -> Judgement:
    """With the samples of one process, the gradient of the ranks is another one."""
    run = case.replay
    if run is None:
        return NotJudged(case.why_no_replay)
    if case.optimizer_exchanges:
        return _NOT_FINAL
    if run.plan.mode == "divided":
        return _gradient_of_gathered(case, run)
    why = _why_not_comparable(case, run.ranks) or _why_not_exact(case.solo, run)
    if why:
        return NotJudged(why)
    one, other = case.solo.gradients(), run.gradients()
    size = float(_flat(one).norm())
    if not size or any(len(other.get(name, ())) != len(own) for name, own in one.items()):
        return _NO_GRADIENT
    differences = {
        name: float((other[name] - own).norm() / own.norm())
        for name, own in one.items()
        if float(own.norm()) > _SMALL_PART * size
    }
    name, most = max(differences.items(), key=lambda each: each[1])
    figure = f"the gradient of {name} differs by {most:.2%} of its norm"
    if most < _DIFFERENT:
        return NoFault(f"{figure}, from that of one process on the same samples.")
    locals_ = [run.local_gradients(log.rank) for log in run.ranks]
    reduction = _manual_reduction(run.ranks[0])
    # The ranks computed the gradient of one process, and their own reduction changed it: to compress it?
    is_note = reduction is not None and all(
        name in own and float((own[name] - one[name]).norm()) < _SAME_GRADIENT * size
        for own in locals_
    )
    return Finding(
        what="the gradient is not that of one process on the same samples.",
        at=(reduction or run.ranks[0].first_backward).at,
        step=1,
        why="the ranks had the weights, samples and random numbers of one process, so what the script does "
        "on several processes changes the gradient.",
        fix="compute the loss on every rank as on one process, and take the mean of the gradients.",
        evidence=f"{figure}, in step 1, from that of one process",
        effect=figure,
        is_note=is_note,
    )


def _gradient_of_gathered(case: Case, run: Run) -> Judgement:
    """Judge the gradient of a loss on gathered values, where each rank has a part of the batch."""
    gather, first = run.ranks[0].gather_for_loss, run.ranks[0].first_forward
    if gather is None:
        return NotJudged("the ranks divide each batch, and the loss is not one of gathered values.")
    if why := _why_not_comparable(case, run.ranks):
        return NotJudged(why)
    if first.buffers or first.drew:
        return NotJudged(
            "with dropout or BatchNorm, the gradient of the parts of a batch is another one."
        )
    one, other = case.solo.gradients(), run.gradients()
    compared = _sizes_and_cosine(one, other)
    if compared is None:
        return _NO_GRADIENT
    ratio, cosine = compared[1] / compared[0], compared[2]
    figure = f"the gradient of step 1 was {ratio:.4g} times as large, with a cosine of {cosine:.3f}"
    if abs(ratio - 1) < _EQUAL and cosine > _SAME_DIRECTION:
        return NoFault(f"{figure}, as that of one process on the same samples.")
    return Finding(
        what="the gradient of a loss of gathered values differs from that of one process.",
        at=gather.at,
        step=1,
        why="the ranks had the parts of one batch, and together gathered all of it. Often the labels lack "
        "the offset of the rank, or the gather passes no gradient to the other ranks.",
        fix="use the index in the gathered tensor as the label (`torch.arange(n) + rank * n`), and gather "
        "with torch.distributed.nn.functional.all_gather.",
        evidence=figure,
        effect=figure,
    )


def _why_not_exact(solo: Run, run: Run) -> str:
    """Why the gradient of ranks that have the samples of one process may differ; empty if it may not."""
    # With equal states of the generators before this step and the next one, all random numbers are equal.
    expected, *others = [_inputs_of_step(log) for log in (*solo.ranks, *run.ranks)]
    if any(own != expected for own in others):
        return "the ranks had different micro-batches or random numbers than one process."
    if _own_generators_differ(run):
        return "the ranks have generators of their own with different states."
    if solo.ranks[0].first_update.optimizer_step is None:
        return "the script adds up the gradients of several backwards itself, perhaps with noise."
    for log in run.ranks:
        exchanged = (event for event in log.in_first_batch if isinstance(event, CollectiveBegun))
        if any("gather" in event.op or len(event.shape) > 1 for event in exchanged):
            return "the ranks exchange features for the loss, so each knows more samples than one process."
        if log.layouts or log.of(CommHookSet):
            return "the gradients are reduced in shards, or by a communication hook."
    losses = _losses(run)
    if not losses or not _are_close(losses, _EQUAL_LOSS):
        return "the losses of the ranks differ, or are not one finite number."
    return ""


def _inputs_of_step(log: RankLog) -> tuple[list[list[int] | None], list[Digests | None]]:
    """The rows of each micro-batch of the first step, and the random states before it and the second."""
    second = next((event for event in log.training_forwards if event.steps_done == 1), None)
    states = [log.first_forward.random, None if second is None else second.random]
    return log.rows_of_first_step, states


def _own_generators_differ(run: Run) -> bool:
    """Whether generators in variables of the script have different states on the ranks in the first steps."""
    states = [
        [e.script_random for e in log.training_forwards if e.script_random] for log in run.ranks
    ]
    return any(own != states[0] for own in states)


def loss_of_rank(case: Case) -> Judgement:
    """The ranks compute different losses from the same batch with the same weights."""
    run = case.replay
    if run is None or run.plan.mode != "mirrored":
        return NotJudged(case.why_no_replay or "the ranks divide each batch.")
    losses = _losses(run)
    if not losses:
        return NotJudged("the loss of step 1 is not one finite number.")
    firsts = [log.first_forward for log in run.ranks]
    if any(event.draws for event in firsts) or _own_generators_differ(run):
        return NotJudged("random numbers are drawn for the batch, and may differ between ranks.")
    begins = [(event.params, event.inputs, event.rows, event.random) for event in firsts]
    if any(own != begins[0] for own in begins):
        return NotJudged("the ranks began step 1 with different weights, inputs or random states.")
    if _are_close(losses, _SAME_LOSS):
        return NoFault("in step 1, all ranks computed the same loss from the same batch.")
    own = case.solo.ranks[0].first_backward.loss
    if own is not None and _are_close([own, losses[0]], _SAME_LOSS):
        return NotJudged(
            "rank 0 computed the loss of one process from its batch, and another rank did not. The script "
            "may draw random numbers for the loss from a generator that it seeds by the rank.",
            is_open=True,
        )
    backward, least, most = run.ranks[0].first_backward, min(losses), max(losses)
    return Finding(
        what="the loss depends on the rank: from the same batch and weights, the ranks compute different "
        "ones.",
        at=backward.at,
        step=backward.steps_done + 1,
        why="the mean over the ranks is then not the gradient of one loss. Often a weight in the loss was "
        "computed from one rank's part of the data.",
        fix="compute what the loss contains from the whole dataset, or alike on all ranks.",
        evidence=f"losses of the ranks: {', '.join(f'{loss:.6g}' for loss in losses)}",
        effect=f"the losses differ by {abs(most / least - 1):.2%}"
        if least
        else f"the losses differ by {most:.3g}",
    )


def _losses(run: Run) -> list[float]:
    """The losses of the ranks in step 1; empty if one of them is no finite number."""
    losses = [log.first_backward.loss for log in run.ranks]
    finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    return finite if len(finite) == len(losses) else []


def _are_close(losses: list[float], rel_tol: float) -> bool:
    return math.isclose(min(losses), max(losses), rel_tol=rel_tol, abs_tol=_ZERO_LOSS)
