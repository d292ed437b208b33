"""Steps of the ranks beside the same steps of one process: what is kept of them, and how it is judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.audit.audit import _with_noise
from paceline.audit.events import (
    BackwardBegun,
    BatchGiven,
    Clipped,
    CollectiveBegun,
    Event,
    ForwardEnded,
    LoaderSeen,
    OptimizerStepBegun,
    PassBegun,
)
from paceline.audit.evidence import RankLog, Run
from paceline.audit.rules.one_process import step_of_one_process
from paceline.audit.rules.rule import Case, Finding, NoFault, NotJudged
from paceline.audit.run_plan import RunPlan

SHAPES = {"w": (12, 10), "b": (7,)}
FLOAT32, BFLOAT16 = (torch.finfo(kind).eps for kind in (torch.float32, torch.bfloat16))
RANKS = pytest.mark.parametrize("count", [2, 3])
Gradient = torch.Tensor  # of all parameters, flat


class Steps:
    """The first step of some ranks and of one process: those of a mean and of DDP, if a test changes nothing.

    Args:
        sizes: The samples in each micro-batch of each rank.
        is_mean: Whether the loss of a micro-batch is the mean of its samples, and not their sum.
    """

    def __init__(
        self, folder: Path, sizes: Sequence[Sequence[int]], *, is_mean: bool = True
    ) -> None:
        self.folder, self.count, self.sizes = folder, len(sizes), sizes
        self.given = 0  # samples in each batch; 0: as many as terms in the loss
        generator = torch.Generator().manual_seed(0)
        parts = [[torch.randn(n, 127, generator=generator).double() for n in own] for own in sizes]
        mean = torch.Tensor.mean if is_mean else torch.Tensor.sum
        steps = len(sizes[0])
        # By rank and micro-batch; then what each optimizer gets before and after the script changes it.
        self.own = [[mean(part, dim=0) / steps for part in own] for own in parts]
        unions = [torch.cat(part) for part in zip(*parts, strict=True)]
        self.one = sum((mean(part, dim=0) / steps for part in unions), torch.zeros(127).double())
        self.reduced = [sum(map(sum, self.own), torch.zeros(127)) / self.count] * self.count
        self.null, self.alone = self.one, sum(self.own[0])
        self.final: list[Gradient] | None = None
        self.final_of_one: Gradient | None = None
        self.events: list[Event] = []  # of a rank, between its backward and its step
        self.drifts = False
        self.eps = FLOAT32
        # By mode, what the step has made of a weight and a buffer that were 1; none if it is empty.
        self.results: dict[str, dict[str, Gradient]] = {}
        self.rates = {"ordinary": 0.1}

    def change(self, to: Callable[[Gradient], Gradient]) -> None:
        """Change what the optimizer of each rank gets."""
        self.reduced = [to(each) for each in self.reduced]

    def _run(self, mode: Any, ranks: int, *gradients: Any) -> Run:
        plan = RunPlan(self.folder / mode, mode, ranks, 1, kept=(0,))
        plan.folder.mkdir()
        logs = []
        for rank, (own, reduced, final) in enumerate(gradients):
            parts = [_by_name(each) for each in own]
            kept = {
                "own": {n: dict(enumerate(p[n] for p in parts)) for n in SHAPES},
                "reduced": _by_name(reduced),
                "final": _by_name(reduced if final is None else final),
                "dimensions": dict.fromkeys(SHAPES),
                "eps": self.eps,
                "is_coupled": False,
            }
            torch.save(kept, plan.folder / f"step-1-0-{rank}.pt")
            for number, named in enumerate(
                ({}, self.results.get(mode, {})) if self.results else ()
            ):
                sizes = {"w": 120, "ema": 120, "b": 7}
                values = named or {name: torch.ones(n) for name, n in sizes.items()}
                file = f"result-1-0-{rank}.pt" if number else f"state-0-0-{rank}.pt"
                saved: Any = {name: (None, value) for name, value in values.items()}
                if number:
                    saved = {"numbers": {n: v.double() for n, v in values.items()}}
                    saved |= {"dimensions": dict.fromkeys(values), "buffers": ["ema"]}
                torch.save(saved, plan.folder / file)
            uses = [
                ForwardEnded(
                    trains=True, sync=True, steps_done=s, params={"w": s * rank * self.drifts}
                )
                for s in (0, 1)
            ]
            events = [
                LoaderSeen(loader="a"),
                PassBegun(loader="a"),
                BatchGiven(loader="a", size=self.given or self.sizes[rank][0]),
                uses[0],
                BackwardBegun(at="t.py:5"),
                *self.events,
                OptimizerStepBegun(step=1, at="t.py:8", lrs=[self.rates.get(mode, 0.1)]),
                uses[1],
            ]
            logs.append(RankLog(rank, events, []))
        return Run(plan, logs, 0)

    def judge(self, *, union: bool = True) -> Any:
        final = self.final or [None] * self.count
        ordinary = self._run(
            "ordinary", self.count, *zip(self.own, self.reduced, final, strict=True)
        )
        of_one = [(x, x, self.final_of_one) for x in (self.one, self.null, self.alone)]
        one, null, alone = (
            self._run(mode, 1, ([x], x, final))
            for mode, (x, _, final) in zip(("union", "null", "alone"), of_one, strict=True)
        )
        if not union:
            return step_of_one_process(Case(one, ordinary, why_no_union="no union."))
        return step_of_one_process(Case(one, ordinary, one, null=null, alone=alone))


def _by_name(flat: Gradient) -> dict[str, torch.Tensor]:
    w, b = flat.split([120, 7])
    return {"w": w.reshape(12, 10), "b": b}


@RANKS
@pytest.mark.parametrize(("of_loss", "eps"), [(True, FLOAT32), (False, FLOAT32), (True, BFLOAT16)])
@pytest.mark.parametrize(
    ("factor", "what"),
    [
        (lambda n: 1.0, ""),
        (lambda n: 1.0 + 1e-7, ""),  # rounding
        (lambda n: n, "summed over the ranks"),
        (lambda n: 1 / n, "divides it again"),
        (lambda n: 1.4, "1.4 times that of one process"),
    ],
)
def test_a_factor(
    count: int, of_loss: bool, eps: float, factor: Any, what: str, tmp_path: Path
) -> None:
    """Of the loss of each rank, or of the reduced gradient. In bfloat16, the factor is not known."""
    steps = Steps(tmp_path, [(4, 4)] * count)
    steps.eps = eps
    steps.change(lambda gradient: gradient * factor(count))
    if of_loss:
        steps.own = [[each * factor(count) for each in own] for own in steps.own]
    judged = steps.judge()
    assert isinstance(judged, Finding if what else NoFault), judged
    if isinstance(judged, Finding):
        if of_loss and factor(2) == 2:
            what = "the loss is multiplied by the number of ranks"
        assert eps == BFLOAT16 or what in judged.what
        # The sum of a rank's samples may be divided by their number after the reduction.
        is_note = eps == BFLOAT16 or (not of_loss and "divides it again" in what)
        assert (judged.at, judged.step, judged.is_note) == ("t.py:5", 1, is_note)


@RANKS
@pytest.mark.parametrize("given", [0, 2])
@pytest.mark.parametrize("sizes", [[(4,), (8,), (6,)], [(4, 8), (8, 4), (4, 8)]])
def test_a_mean_of_means(count: int, sizes: list[Any], given: int, tmp_path: Path) -> None:
    """Of ranks and of micro-batches. In equal batches, samples may have different numbers of terms."""
    steps = Steps(tmp_path, sizes[:count])
    steps.given = given
    judged = steps.judge()
    assert isinstance(judged, Finding), judged
    assert "a mean of means" in judged.what
    assert judged.is_note == (given > 0 and len(sizes[0]) == 1)


@RANKS
def test_ranks_of_unequal_sizes_whose_gradients_are_weighted(count: int, tmp_path: Path) -> None:
    steps = Steps(tmp_path, [(4,), (8,), (6,)][:count])
    steps.reduced = [steps.one] * count
    assert isinstance(steps.judge(), NoFault)


@RANKS
def test_a_sum_over_samples_is_a_note(count: int, tmp_path: Path) -> None:
    judged = Steps(tmp_path, [(4,)] * count, is_mean=False).judge()
    assert isinstance(judged, Finding), judged
    assert "the loss is a sum over them" in judged.why
    assert judged.is_note


@RANKS
@pytest.mark.parametrize(
    ("reduced", "drifts", "what"),
    [
        ("none", True, "the gradient is not reduced"),
        ("none", False, "the gradient is not reduced"),  # the weights are made equal: a note
        ("first", True, "of some micro-batches is not reduced"),
        ("clipped", False, "clips its own gradient before the reduction"),
    ],
)
def test_gradients_that_are_not_reduced(
    count: int, reduced: str, drifts: bool, what: str, tmp_path: Path
) -> None:
    steps = Steps(tmp_path, [(4, 4)] * count)
    steps.drifts = drifts
    steps.reduced = [sum(own) for own in steps.own]
    if reduced == "first":
        first = sum(own[0] for own in steps.own) / count
        steps.reduced = [first + own[1] for own in steps.own]
    if reduced == "clipped":
        steps.events = [
            Clipped(at="t.py:6", norm=9.0, max_norm=1.0),
            CollectiveBegun(op="all_reduce"),
        ]
    judged = steps.judge()
    assert isinstance(judged, Finding), judged
    assert what in judged.what
    assert judged.is_note == (reduced == "none" and not drifts)


@RANKS
def test_a_clip_after_the_reduction(count: int, tmp_path: Path) -> None:
    steps = Steps(tmp_path, [(4,)] * count)
    steps.final_of_one = steps.one * 0.3
    steps.final = [each * 0.3 for each in steps.reduced]
    assert isinstance(steps.judge(), NoFault)
    (tmp_path / "own").mkdir()
    steps.folder = tmp_path / "own"
    steps.final = [each * 0.2 for each in steps.reduced]
    judged = steps.judge()
    assert isinstance(judged, Finding), judged
    assert "after the reduction" in judged.what


@RANKS
@pytest.mark.parametrize("kind", ["w", "ema"])
@pytest.mark.parametrize(
    ("of_ranks", "of_null", "is_found"),
    [
        (1.01, 1.01, False),
        (1.01 + 1e-7, 1.01, False),  # rounding
        (1.005, 1.01, True),
        (1.005, 1.008, False),  # noise
    ],
)
def test_what_a_step_makes_of_weights_and_buffers(
    count: int, kind: str, of_ranks: float, of_null: float, is_found: bool, tmp_path: Path
) -> None:
    steps = Steps(tmp_path, [(4,)] * count)
    ends = {"ordinary": of_ranks, "union": 1.01, "null": of_null}
    steps.results = {
        mode: {name: torch.full((120,), end if name == kind else 1.0) for name in ("w", "ema")}
        for mode, end in ends.items()
    }
    for mode in ("alone", *ends):
        steps.results.setdefault(mode, {})
    judged = steps.judge()
    assert isinstance(judged, Finding if is_found else NoFault), judged
    if isinstance(judged, Finding):
        assert kind in judged.what
        assert (judged.at, judged.step, judged.is_note) == ("t.py:8", 1, True)
        assert "50.00%" in judged.evidence


@RANKS
@pytest.mark.parametrize("is_equal", [True, False])
def test_a_factor_that_the_optimizer_takes_out_is_a_note(
    count: int, is_equal: bool, tmp_path: Path
) -> None:
    steps = Steps(tmp_path, [(4,)] * count)
    steps.change(lambda gradient: gradient * count)
    ends = {"ordinary": 1.01 if is_equal else 1.02, "union": 1.01, "null": 1.01, "alone": 1.01}
    steps.results = {
        mode: {"w": torch.full((120,), end), "b": torch.full((7,), end)}
        for mode, end in ends.items()
    }
    judged = steps.judge()
    assert isinstance(judged, Finding)
    assert "summed over the ranks" in judged.what
    assert judged.is_note == is_equal


def test_a_mask_with_infinite_numbers_is_equal(tmp_path: Path) -> None:
    steps = Steps(tmp_path, [(4,)] * 2)
    mask = torch.ones(120)
    mask[:60] = -torch.inf
    mask[60] = 2.0
    steps.results = {mode: {"ema": mask} for mode in ("ordinary", "union", "null", "alone")}
    assert isinstance(steps.judge(), NoFault)


def test_weights_are_not_compared_between_learning_rates(tmp_path: Path) -> None:
    """A learning rate that grows with the number of ranks is a choice."""
    steps = Steps(tmp_path, [(4,)] * 2)
    steps.rates["ordinary"] = 0.2
    steps.results = {
        mode: {"w": torch.full((120,), 1.02 if mode == "ordinary" else 1.01)}
        for mode in ("ordinary", "union", "null", "alone")
    }
    assert isinstance(steps.judge(), NoFault)


@RANKS
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_random_numbers(count: int, factor: float, tmp_path: Path) -> None:
    """They hide a small difference only."""
    steps = Steps(tmp_path, [(4,)] * count)
    noise = [0.03 * float(steps.one.norm()) * x for x in torch.eye(127)[:2].double()]
    steps.null, steps.one = steps.one + noise[0], steps.one + noise[1]
    steps.change(lambda gradient: gradient * factor)
    judged = steps.judge()
    assert isinstance(judged, NotJudged if factor == 1 else Finding), judged
    if isinstance(judged, NotJudged):
        assert "by up to 4%" in judged.why


@RANKS
@pytest.mark.parametrize("eps", [FLOAT32, BFLOAT16])
def test_a_loss_that_compares_samples_is_a_note(count: int, eps: float, tmp_path: Path) -> None:
    """In bfloat16 a small difference is rounding."""
    steps = Steps(tmp_path, [(4,)] * count)
    steps.eps = eps
    steps.one = steps.null = steps.one * (1 + 0.05 * torch.linspace(-1, 1, 127).double())
    judged = steps.judge()
    assert isinstance(judged, Finding if eps == FLOAT32 else NoFault), judged
    if isinstance(judged, Finding):
        assert "compares samples" in judged.why
        assert judged.is_note


@RANKS
def test_without_a_run_of_one_process_a_sum_is_a_note(count: int, tmp_path: Path) -> None:
    for name, factor in (("mean", 1), ("sum", count)):
        (tmp_path / name).mkdir()
        steps = Steps(tmp_path / name, [(4,)] * count)
        steps.change(lambda gradient, factor=factor: gradient * factor)
        judged = steps.judge(union=False)
        assert isinstance(judged, NotJudged if factor == 1 else Finding), judged
        if isinstance(judged, Finding):
            assert "the sum of the ranks' gradients" in judged.what
            assert judged.is_note


def test_a_difference_is_not_judged_if_one_process_cannot_repeat_its_run(tmp_path: Path) -> None:
    one = Run(RunPlan(tmp_path, "union", 1, 1), [RankLog(0, [], [])], 0)
    ranks = Run(RunPlan(tmp_path, "ordinary", 2, 1), [RankLog(r, [], []) for r in (0, 1)], 0)
    case = _with_noise(
        Case(one, ranks, union=one),
        one.plan,
        lambda plan: replace(one, plan=plan, hung=True),
        tmp_path,
    )
    assert case.union is None
    assert isinstance(step_of_one_process(case), NotJudged)
