"""No check of `paceline verify` raises on damaged logs, such as those of ranks that were killed."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from mutations import read_program
from verifying import verify

from paceline.audit.audit import judge
from paceline.audit.evidence import Run, read_logs
from paceline.audit.rules.rule import Case, NotJudged
from paceline.audit.run_plan import RunPlan

pytestmark = pytest.mark.usefixtures("verify_server")

CASES = 80


def case_of(runs: dict[str, Path]) -> Case:
    """What was recorded in the folders of the runs, with the union in place of the null run."""
    solo = RunPlan(runs["solo"], "solo", 1, 40)
    ordinary = RunPlan(runs["ordinary"], "ordinary", 2, 40, kept=(0, 1, 39), ranks=2)
    plan = replace(ordinary, mode="union", world_size=1, source=ordinary.folder)
    union, null = (replace(plan, folder=runs[name]) for name in ("union", "null"))
    made = [Run(each, read_logs(each.folder, each.world_size), 0) for each in (solo, ordinary)]
    later = [Run(each, read_logs(each.folder, 1), 0) for each in (union, null)]
    return Case(*made, union=later[0], null=later[1])


def damage(path: Path, chance: random.Random) -> None:
    """Cut, drop, repeat or move lines of a log."""
    lines = path.read_text().splitlines()
    first, last = sorted(chance.choices(range(len(lines) + 1), k=2))
    last = min(last, first + 20)
    match chance.choice(["cut", "cut in a line", "drop", "repeat", "move"]):
        case "cut":
            lines = lines[:first]
        case "cut in a line":
            lines = [*lines[:first], *(line[: len(line) // 2] for line in lines[first:last][:1])]
        case "drop":
            del lines[first:last]
        case "repeat":
            lines[last:last] = lines[first:last]
        case "move":
            lines = lines[:first] + lines[last:] + lines[first:last]
    path.write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize("name", ["classifier", "scaler"])
def test_no_check_raises_on_damaged_logs(name: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(read_program(name))
    kept = tmp_path / "kept"
    assert (
        verify("--steps", "40", "--keep", str(kept), str(script), folder=tmp_path).returncode == 0
    )
    runs = {path.name.partition("-")[0]: path for path in kept.iterdir() if path.is_dir()}
    runs.setdefault("null", runs["union"])
    chance = random.Random(0)
    for number in range(CASES):
        damaged = runs.copy()
        for run in chance.sample(sorted(runs), k=chance.choice([1, 1, 2])):
            damaged[run] = tmp_path / f"{run}-{number}"
            shutil.copytree(runs[run], damaged[run])
            for log in damaged[run].glob("*.jsonl"):
                if chance.random() < 0.7:
                    damage(log, chance)
        for check, judgement in judge(case_of(damaged)).items():
            is_bug = isinstance(judgement, NotJudged) and "a bug of paceline" in judgement.why
            assert not is_bug, (number, check, judgement)
        for run in damaged.keys() - {k for k in runs if damaged[k] == runs[k]}:
            shutil.rmtree(damaged[run])
