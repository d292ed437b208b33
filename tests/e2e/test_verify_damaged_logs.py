"""No check of `paceline verify` raises on damaged logs, such as those of ranks that were killed."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from recorded_runs import read_case, unpacked

from paceline.audit.audit import judge
from paceline.audit.rules.rule import NotJudged

CASES = 60


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


@pytest.mark.parametrize(
    "name", [pytest.param("class_weights_of_one_rank", marks=pytest.mark.ci), "scaler"]
)
def test_no_check_raises_on_damaged_logs(name: str, tmp_path: Path) -> None:
    chance = random.Random(0)
    with unpacked() as runs:
        for number in range(CASES):
            damaged = tmp_path / str(number)
            shutil.copytree(runs / name, damaged)
            for log in damaged.rglob("*.jsonl"):
                if chance.random() < 0.4:
                    damage(log, chance)
            for check, judgement in judge(read_case(damaged)).items():
                is_bug = isinstance(judgement, NotJudged) and "a bug of paceline" in judgement.why
                assert not is_bug, (number, check, judgement)
            shutil.rmtree(damaged)
