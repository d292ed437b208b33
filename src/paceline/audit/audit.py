"""The audit of a script that does not know paceline: three runs, twenty rules, one verdict.

A script for torchrun fixes the batch of a rank, so its runs at N = 1 and N = 2 train on different data and
cannot be compared. Ground truth is a run whose ranks are all given what the run of one process saw; an
ordinary run beside it shows shards, order, coverage and drift.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.audit.evidence import Event, RankLog, Run
from paceline.audit.plan import Mode, RunPlan
from paceline.audit.refusals import Refused, refuse, refuse_early_exit
from paceline.audit.rules import BLIND_IN_JOIN, COLLECTIVES, DRIFT, ONE_RANK, RULES
from paceline.audit.rules.judgement import Case, Fault, Judgement, Rule, Sound, Unknown
from paceline.errors import name_ranks

Execute = Callable[[RunPlan], Run]


@dataclass(frozen=True)
class Audit:
    """What the rules found at one number of processes."""

    case: Case
    judgements: dict[str, Judgement] = field(default_factory=dict)

    @property
    def faults(self) -> dict[str, Fault]:
        """The faults by the names of their rules."""
        return {name: each for name, each in self.judgements.items() if isinstance(each, Fault)}

    def unknown(self) -> dict[str, Unknown]:
        """The rules that could not judge."""
        return {name: each for name, each in self.judgements.items() if isinstance(each, Unknown)}

    def sound(self) -> dict[str, Sound]:
        """The rules that found nothing wrong."""
        return {name: each for name, each in self.judgements.items() if isinstance(each, Sound)}

    def facts(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "nproc": self.case.world_size,
            "faults": [{"rule": name, **each.facts()} for name, each in self.faults.items()],
            "sound": [{"rule": n, "evidence": each.evidence} for n, each in self.sound().items()],
            "unknown": [{"rule": n, "why": each.why} for n, each in self.unknown().items()],
        }

    def words(self) -> list[str]:
        """The report, line by line."""
        lines = []
        for name, fault in self.faults.items():
            lines += _fault_words(name, fault, self.case.world_size)
        lines += self._compared()
        sound = [f"  {name}: {each.evidence}" for name, each in self.sound().items()]
        unknown = [f"  {name}: {each.why}" for name, each in self.unknown().items()]
        if sound:
            lines += [f"found right ({len(sound)}):", *sound]
        if unknown:
            lines += [f"could not be judged ({len(unknown)}):", *unknown]
        return lines

    def _compared(self) -> list[str]:
        case = self.case
        runs = [case.solo, case.ordinary] + ([case.replay] if case.replay else [])
        return ["compared: " + ", ".join(f"{run.name} ({run.steps} steps)" for run in runs)]


def audit(solo: Run, world_size: int, execute: Execute, folder: Path, steps: int) -> Audit:
    """Judge a script at one number of processes, given its run of one.

    Raises:
        Refused: a run of the script failed in a way that is no fault of the twenty.
    """
    ordinary = execute(RunPlan(folder / f"ordinary-{world_size}", "ordinary", world_size, steps))
    refuse_early_exit(ordinary)
    mode, why = _replay_mode(solo, ordinary)
    replay = None
    if ordinary.hung:
        why = "the run hung, so no run beside it was made."
    elif mode is not None:
        plan = RunPlan(folder / f"{mode}-{world_size}", mode, world_size, steps, solo.plan.folder)
        done = execute(plan)
        why = _why_not(done, solo)
        replay = None if why else done
    case = Case(solo, ordinary, replay, why)
    judgements = {rule.name: _judge(rule, case) for rule in RULES}
    found = Audit(case, _without_consequences(judgements))
    if not found.faults:
        refuse(ordinary)
        _refuse_uncommon(case)
        judgements[DRIFT.name] = _judge(DRIFT, case)
    return found


def _judge(rule: Rule, case: Case) -> Judgement:
    joins = any(log.first("join") for log in case.ranks)
    if joins and rule.name in BLIND_IN_JOIN:
        return Unknown("ranks with fewer batches stand in for their missing steps (Join).")
    try:
        return rule.judge(case)
    except Exception as error:
        # Scripts do what nobody foresaw. One rule that stumbles must not look like a fault, nor take the
        # others' judgements with it.
        return Unknown(
            f"this rule stumbled over the evidence, which is a mistake of ours: {error!r}."
        )


def _without_consequences(judgements: dict[str, Judgement]) -> dict[str, Judgement]:
    """Ranks that skipped a step end at different moments, which must not count as a second fault."""
    alone, entered = judgements[ONE_RANK.name], judgements[COLLECTIVES.name]
    if isinstance(alone, Fault) and isinstance(entered, Fault):
        judgements[COLLECTIVES.name] = Unknown("the ranks did not take the same steps.")
    return judgements


def _refuse_uncommon(case: Case) -> None:
    """Refuse a script whose number of steps depends on the number of processes.

    That a loader's shard is shorter for more processes is as it should be, and the replay makes up for it.

    Raises:
        Refused: with the numbers.
    """
    wanted = case.solo.plan.steps  # a loader that is made anew after them may give one more batch
    alone = min(wanted, case.solo.steps)
    together = min(wanted, (case.replay or case.ordinary).steps)
    by_hand = not case.ranks[0].training_loaders
    if alone != together and (by_hand or case.replay is not None):
        raise Refused(
            f"the script takes {alone} steps with 1 process and {together} with {case.world_size}.",
            where=case.solo.ranks[0].of("step")[-1]["at"],
            why="what is trained differs from the start, so no comparison says anything.",
            fix=f"make the number of steps independent of it, or compare fewer: --steps "
            f"{min(alone, together)}.",
            output=[],
        )


def _replay_mode(solo: Run, ordinary: Run) -> tuple[Mode | None, str]:
    """Whether the ranks are to get the whole batches of the solo run, or a part each."""
    alone = _first_size(solo.ranks[0])
    each = [_first_size(log) for log in ordinary.ranks]
    if alone is None or None in each:
        return None, "no DataLoader gave batches that could be given to all ranks."
    if all(size == alone for size in each):
        return "mirrored", ""
    if sum(size or 0 for size in each) == alone:
        if not _first_batch(solo.ranks[0])["first"]:
            return None, "batches do not have their samples in the first dimension."
        return "dealt", ""
    sizes = ", ".join(map(str, each))
    return None, f"one process trains on batches of {alone}, the ranks on batches of {sizes}."


def _first_size(log: RankLog) -> int | None:
    batch = _first_batch(log)
    return len(batch["ids"]) if batch.get("ids") else batch.get("size")


def _first_batch(log: RankLog) -> Event:
    loaders = set(log.training_loaders)
    batch = next((event for event in log.of("batch") if event["loader"] in loaders), {})
    return {**batch, "first": not batch.get("ids") or len(batch["ids"]) == batch["size"]}


def _why_not(replay: Run, solo: Run) -> str:
    if replay.hung or (replay.returncode and replay.steps < replay.plan.steps):
        return f"{replay.name} failed: the script does not take the batches of one process."
    return ""


def _fault_words(name: str, fault: Fault, world_size: int) -> list[str]:
    step = f", step {fault.step}" if fault.step is not None else ""
    return [
        f"FAULT  {fault.what}",
        f"  rule:  {name}",
        f"  where: {fault.at}, {name_ranks(list(fault.ranks), world_size)}{step}",
        f"  why:   {fault.why}",
        f"  shown: {fault.evidence}",
        f"  fix:   {fault.fix}",
        "",
    ]
