"""The comparison of runs that use paceline, on made-up runs: the first difference and nothing after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.verify.compare import compare
from paceline.verify.evidence import Event, RankLog, Run
from paceline.verify.plan import RunPlan

STEPS = 4


def training(rank: int, count: int, change: dict[tuple[int, str], Any]) -> list[Event]:
    """The events of a rank that trains four samples a step; `change` is by step and fact."""
    events: list[Event] = [
        {"k": "training", "at": "t.py:9 in main()", "precision": "fp32", "batchnorm": False}
    ]
    for s in range(1, STEPS + 1):
        mine = [i for i in range(4 * s - 4, 4 * s) if i % count == rank]
        step = {"k": "paceline-step", "s": s, "epoch": 0, "ids": mine, "loss": float(len(mine))}
        step |= {"count": float(len(mine)), "params": {"w": [f"d{s}", 2.0, [1.0, 2.0]]}}
        step |= {name: value for (at, name), value in change.items() if at == s and name in step}
        norm = change.get((s, "norm"), 3.0)
        events += [{"k": "step", "s": s, "grads": {"w": ["x", norm]}}, step]
    return events


def runs(*changes: dict[tuple[int, str], Any], told: dict[str, Any] | None = None) -> list[Run]:
    """One process as it should be, and as many as there are changes."""
    found = []
    for count, each in ((1, ({},)), (len(changes), changes)):
        logs = [RankLog(r, training(r, count, change), []) for r, change in enumerate(each)]
        for log in logs:
            log.events[0].update(told or {})
        found.append(Run(RunPlan(Path("x"), "ordinary", count, STEPS), logs, 0))
    return found


def test_equal_runs_are_sound() -> None:
    found = compare(runs({}, {}, {}), rtol=None, bitwise=True)
    assert (found.verdict, found.difference, found.unknown) == ("sound", None, [])
    assert found.equal == [
        "samples of a step: 4 compared", "loss: 4 compared", "gradient norm: 4 compared",
        "parameter: 12 compared",
    ]  # fmt: skip
    assert found.words()[-1] == "sound: the same training on every number of processes"


FIRST = [
    ({(2, "ids"): [5, 99]}, 2, "samples", ([7], [99])),
    ({(3, "ids"): [9, 9]}, 3, "samples", ([11], [9])),
    ({(3, "loss"): 2.5, (4, "ids"): []}, 3, "loss", (1.0, 1.125)),
    ({(2, "params"): {"w": ["other", 2.5, [1.0, 2.5]]}}, 2, "parameter", (2.0, 2.5)),
    ({(2, "params"): {}}, 2, "parameter", (2.0, None)),
]


@pytest.mark.parametrize("bitwise", [True, False])
@pytest.mark.parametrize(("change", "step", "quantity", "values"), FIRST)
def test_the_first_difference(
    change: dict[tuple[int, str], Any], step: int, quantity: str, values: Any, bitwise: bool
) -> None:
    found = compare(runs({}, change), rtol=None, bitwise=bitwise)
    assert found.verdict == "fault"
    assert found.difference is not None
    assert (found.difference.step, found.difference.quantity) == (step, quantity)
    assert found.difference.values == values
    assert found.words()[0].startswith(f"FAULT  in step {step}, {quantity}")


def test_a_gradient_that_was_changed_on_the_way() -> None:
    found = compare(runs({(2, "norm"): 6.0}, {}), rtol=None, bitwise=False)
    assert found.difference is not None
    assert (found.difference.quantity, found.difference.relative) == ("gradient norm", 0.5)


def test_rounding_is_a_difference_of_bits_alone() -> None:
    change = {(2, "params"): {"w": ["other", 2.0, [1.0, 2.0 + 1e-7]]}}
    assert compare(runs({}, change), rtol=None, bitwise=False).verdict == "sound"
    assert compare(runs({}, change), rtol=1e-9, bitwise=False).verdict == "fault"
    assert compare(runs({}, change), rtol=None, bitwise=True).verdict == "fault"


@pytest.mark.parametrize(
    ("told", "word"), [({"batchnorm": True}, "BatchNorm"), ({"precision": "bf16"}, "bf16")]
)
def test_what_cannot_be_equal_is_not_judged(told: dict[str, Any], word: str) -> None:
    found = compare(runs({}, {(2, "loss"): 9.0}, told=told), rtol=None, bitwise=False)
    assert found.verdict == "sound"
    assert word in found.unknown[0]
    assert (
        compare(runs({}, {(2, "loss"): 9.0}, told=told), rtol=None, bitwise=True).verdict == "fault"
    )


def test_another_number_of_steps_is_refused() -> None:
    one, two = runs({}, {})
    for log in two.ranks:
        log.events[-1]["k"] = "left out"
    found = compare([one, two], rtol=None, bitwise=False)
    assert found.verdict == "refused"
    assert "takes 4 steps with 1 process and 3 with 2" in found.why
