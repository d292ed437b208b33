"""The run as a whole: how often each sample is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from paceline.audit.events import (
    BatchGiven,
    PassCut,
    TrainingContinues,
)
from paceline.audit.evidence import RankLog, Run
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault, NotJudged

# Up to this share of the samples may be used more or less often: padding, and samples that a pass leaves out.
# See sound/13_hand_schedule and broken/03_random_split. Four times _FEW changes broken/72_resumed_position.
_FEW = 0.05
_DROPPED = 0.005
# In shorter passes, more samples than that may be left out in each of them.
# A quarter changes broken/01_set_epoch_on_one_rank, four times as many broken/03_stream_overlaps.
_STEPS_OF_PASS = 20
# One process used at least _FEW_OFTEN samples at least _OFTEN times each, and the ranks never used this share
# of them: too many for chance. See broken/98_weighted_parts.
_OFTEN, _FEW_OFTEN, _NEVER = 4, 20, 0.3


def uneven_use(case: Case) -> Judgement:
    """One process uses each sample equally often, and N processes together do not."""
    logs = [case.solo.ranks[0], *case.ranks]
    if any(log.of(PassCut) for log in logs):
        return NotJudged("verification cut a pass over the samples.")
    if _leaves_out(case.solo) or _leaves_out(case.ordinary):
        return NotJudged("a pass leaves out some samples, others in each pass.")
    batches = [_used_batches(log) for log in logs]
    if all(own and all(event.ids for event in own) for own in batches):
        solo, *counts = [Counter[Any](i for e in own for i in e.ids or ()) for own in batches]
    elif len({event.model for log in logs for event in log.training_forwards}) > 1:
        return NotJudged("several models are trained, and one may be given what another computed.")
    else:  # known by what the model was given
        solo, *counts = [
            Counter[Any](row for e in log.training_forwards for row in e.rows or ()) for log in logs
        ]
        if not solo.keys() >= set().union(*counts):
            return NotJudged("some inputs are none of one process: they may be padded.")
    total = sum(counts, Counter[Any]())
    if sum(map(len, counts)) == len(total):
        return NotJudged("no sample was used by two ranks, so each rank may keep its own.")
    per_step = max(
        solo.total() / max(case.solo.steps, 1), total.total() / max(case.ordinary.steps, 1)
    )
    if len(solo) < _STEPS_OF_PASS * per_step:
        return NotJudged("a pass over the samples has only a few steps.")
    # The watched steps may end within a pass, after which some samples were used once more.
    is_whole = len(set(solo.values())) == 1 and all(map(_ends_with_a_pass, logs))
    slack = 0 if is_whole else 1
    uses_of_one, share_of_one = _usual_uses(solo, solo, slack)
    if share_of_one > _FEW:
        return _never_used(case, solo, total)
    uses, share = _usual_uses(total, solo, slack)
    if share <= _FEW:
        return NoFault(f"each sample was used {_as_text(uses, slack)}.")
    least, most = min(total[i] for i in solo), max(total.values())
    return Finding(
        what="the ranks together do not use all samples equally often.",
        at=_place(case),
        why="some samples are skipped and others repeated. Often a position or a length that counts the "
        "samples of all ranks is used for those of one rank, as in a resume, or a stream is divided twice.",
        fix="compute positions in the order of all samples first, then give each rank its part once.",
        evidence=f"the samples were used {least} to {most} times; one process used each "
        f"{_as_text(uses_of_one, slack)}",
        effect=f"{share:.0%} of the samples are used too often or too rarely",
    )


def _place(case: Case) -> str:
    """The line of the last training loader; without one, of the last forward of training."""
    log = case.ranks[0]
    loaders = [log.loaders[name] for name in log.training_loaders]
    return (loaders or log.training_forwards)[-1].at


def _never_used(case: Case, solo: Counter[Any], total: Counter[Any]) -> Judgement:
    """The same for samples that one process draws at random: the ranks together never draw many of them."""
    often = [sample for sample, uses in solo.items() if uses >= _OFTEN]
    never = [sample for sample in often if sample not in total]
    is_known = len(often) >= _FEW_OFTEN and total.total() >= solo.total()
    if not is_known or len(never) <= _NEVER * len(often):
        return NotJudged("one process does not use each sample equally often either.")
    return Finding(
        what="the ranks together never use many samples that one process uses often.",
        at=_place(case),
        why="each rank draws samples at random. Often it draws positions in its own part, and uses them as "
        "indices of the whole dataset.",
        fix="map what a rank draws to indices of the dataset, as in `indices[position]`.",
        evidence=f"{len(never)} of {len(often)} samples that one process used at least {_OFTEN} times were "
        "used by no rank",
        effect=f"{len(never) / len(often):.0%} of these samples are never used",
    )


def _used_batches(log: RankLog) -> list[BatchGiven]:
    """The training batches, without those that the script skips to resume within a pass."""
    found: list[BatchGiven] = []
    # No backward follows a batch of the first loader in `for a, b in zip(...)`.
    followed = {name for (name, _), own in log.passes.items() if any(own.backwards)}
    for (name, _), own in log.passes.items():
        if name in log.training_loaders:
            trained = [i for i, backwards in enumerate(own.backwards) if backwards]
            skipped = 0
            if name in followed:
                # The backwards of several batches may come after the last of them.
                group = trained[1] - trained[0] if len(trained) > 1 else 1
                skipped = trained[0] + 1 - group if trained else len(own.batches)
            found += own.batches[skipped if skipped > 1 else 0 :]  # a loader may be one batch ahead
    return found


def _ends_with_a_pass(log: RankLog) -> bool:
    """Whether the training ended at the end of a pass over its samples."""
    passes = [own for (name, _), own in log.passes.items() if name in log.training_loaders]
    return bool(passes) and passes[-1].ended and not log.of(TrainingContinues)


def _leaves_out(run: Run) -> bool:
    """Whether the batches of a pass have fewer samples than the dataset, as with `drop_last`."""
    log = run.ranks[0]
    for loader in (log.loaders[name] for name in log.training_loaders[:1]):
        samples, batches, size = loader.root_samples, loader.batches, loader.batch_size
        if samples is not None and batches is not None and size is not None:
            return batches * size * len(run.ranks) < (1 - _DROPPED) * samples
    return False


def _usual_uses(uses: Counter[Any], samples: Collection[Any], slack: int) -> tuple[int, float]:
    """The usual number of uses n, and the share of the samples that are not used n to n + `slack` times."""
    samples_by_uses = Counter(uses[i] for i in samples)
    usual = {n: sum(samples_by_uses[n + i] for i in range(slack + 1)) for n in samples_by_uses}
    most = max(usual, key=lambda n: (usual[n], -n))
    return most, 1 - usual[most] / max(samples_by_uses.total(), 1)


def _as_text(uses: int, slack: int) -> str:
    return f"{uses} or {uses + 1} times" if slack else f"{uses} time{'s' * (uses != 1)}"
