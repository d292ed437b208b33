"""The types of the rules: the evidence of one script, a rule, and its judgement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from paceline.audit.events import DDPBuilt, OptimizerStepBegun, OptimizerStepEnded, TensorsSent
from paceline.audit.evidence import RankLog, Run
from paceline.audit.rules.states import Mismatch, find_mismatch


@dataclass(frozen=True)
class Case:
    """The runs of one script that a rule may use."""

    solo: Run  # the run of one process
    ordinary: Run  # the unchanged script on several processes
    union: Run | None = (
        None  # one process with the samples and weights of the ranks; None if not possible
    )
    why_no_union: str = ""  # the reason, as a sentence
    why_no_steps: str = ""  # why its steps are not those of the ranks, as a sentence
    null: Run | None = None  # the union again, in another order; None if it was not needed
    alone: Run | None = None  # the same for the samples of rank 0 alone

    @property
    def ranks(self) -> list[RankLog]:
        """The ranks of the ordinary run."""
        return self.ordinary.ranks

    @property
    def world_size(self) -> int:
        """The number of ranks of the ordinary run."""
        return self.ordinary.plan.world_size

    @cached_property
    def mismatch(self) -> Mismatch | None:
        """The first point at which the ranks use different weights; None if there is none."""
        return find_mismatch(self.ranks)

    @property
    def trains_together(self) -> bool:
        """Whether the ranks are seen to exchange gradients, or parts of the model, in the watched steps."""
        return self.ranks[0].trains_together or self.optimizer_exchanges

    @cached_property
    def optimizer_exchanges(self) -> bool:
        """Whether the optimizer gets a rank's own gradient in step 1, and exchanges it or the weights."""
        grads = [[event.grads for event in log.optimizer_steps(1)] for log in self.ranks]
        if all(own == grads[0] for own in grads):
            return False
        params = [
            [e.params for e in log.of(OptimizerStepEnded) if e.step == 1] for log in self.ranks
        ]
        are_equal = any(params[0]) and all(own == params[0] for own in params)
        return are_equal or any(log.exchanges_in_optimizer for log in self.ranks)

    @cached_property
    def parts_of_equal_batches(self) -> bool:
        """Whether ranks with one batch have different inputs or losses in step 1, not by random numbers.

        They then compute different parts of the same samples, such as parts of each sequence.
        """
        firsts: dict[Any, tuple[Any, Any]] = {}
        for log in self.ranks:
            forward, batches = log.first_forward, log.training_batches
            if batches and not forward.draws:
                begin = batches[0].content, *(forward.params or {}).values()
                own = forward.rows, None if forward.drew else log.first_backward.loss
                if firsts.setdefault(begin, own) != own:
                    return True
        return False

    @property
    def has_dividing_sampler(self) -> bool:
        """Whether a sampler gives each rank its own part of the training data."""
        log = self.ranks[0]
        loaders = [log.loaders[name] for name in log.training_loaders]
        return any(each.sharding.get("num_replicas", 1) == self.world_size for each in loaders)

    @property
    def divides_equal_batches(self) -> bool:
        """Whether ranks with equal batches give their models different samples, together at most a batch."""
        sizes = [e.size or 0 for e in self.ranks[0].training_batches]
        batches = [[e.ids or e.content for e in log.training_batches] for log in self.ranks]
        forwards = list(zip(*(each.training_forwards for each in self.ranks), strict=False))
        if not sizes or not forwards or any(own != batches[0] for own in batches):
            return False
        for size, parts in zip(sizes, forwards, strict=False):
            rows = [row for event in parts for row in event.rows or ()]
            if not rows or len(set(rows)) < len(rows) or len(rows) > size:
                return False
        return True

    @property
    def splits_model(self) -> bool:
        """Whether the ranks may hold parts of one model, so that equal samples are right."""
        log = self.ranks[0]
        sizes = [event.group_size for event in log.of(DDPBuilt)]
        if sizes or "data" in log.layouts:
            return any(size != self.world_size for size in sizes) or log.exchanges_parts
        return "parts" in log.layouts or log.exchanges_activations or bool(log.of(TensorsSent))

    @property
    def updates_differ(self) -> bool:
        """Whether the ranks update different parameters, and take different numbers of steps.

        Without DDP, a rank that never steps an optimizer may get its weights from another one.
        """
        each = {
            frozenset(name for e in log.of(OptimizerStepBegun) for name in e.grads)
            for log in self.ranks
            if log.steps or not any(e.sync is not None for e in log.training_forwards)
        }
        return len(each) > 1 and len({log.steps for log in self.ranks}) > 1


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A fault or a note, with its evidence."""

    what: str  # one sentence
    at: str  # the line of the script
    why: str
    fix: str
    evidence: str
    effect: str  # how large it is, with a number
    # The first optimizer step with wrong results, from 1; None if it is in no single step.
    step: int | None = None
    ranks: Sequence[int] = ()  # the ranks that behave wrongly; empty for all ranks
    # Whether it is a note, not a fault: the effect is small, or it may be a choice.
    is_note: bool = False

    def facts(self, world_size: int) -> dict[str, Any]:
        """The finding as JSON."""
        return asdict(self) | {"ranks": list(self.ranks or range(world_size))}


@dataclass(frozen=True)
class NoFault:
    """The rule found no fault; also if the script has nothing that the rule looks at."""

    evidence: str


@dataclass(frozen=True)
class NotJudged:
    """The rule cannot judge the script."""

    why: str


Judgement = Finding | NoFault | NotJudged


@dataclass(frozen=True)
class Rule:
    """One kind of fault."""

    name: str
    judge: Callable[[Case], Judgement]
    # Whether the rule works under DDP's Join, where a rank without batches enters the collectives of the
    # others.
    works_with_join: bool = True
    # Whether what the rule reports is also a fault if the ranks hold parts of one model.
    judges_split_models: bool = False
    # Whether the rule compares numbers with those of one process. If it finds a difference, it is asked once
    # more, with another run of one process (`Case.null`) that shows what chance and rounding change.
    compares_numbers: bool = False
    # The names of rules. A fault of one of them also causes what this rule looks for, and makes a finding of
    # this rule `NotJudged`.
    consequence_of: tuple[str, ...] = ()


def outliers(values: Sequence[Any]) -> list[int]:
    """The ranks whose value is not the most frequent one; on a tie, not that of rank 0."""
    most = max(values, key=lambda value: (values.count(value), value == values[0]))
    return [rank for rank, value in enumerate(values) if value != most]
