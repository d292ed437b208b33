"""Frames of `paceline top`, from synthetic runs: whole, torn, of many ranks, narrow, and not of a run."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from run_folders import write_folder

from paceline.clock import record
from paceline.clock.record import Window
from paceline.clock.step_clock import PHASES
from paceline.metrics.json_lines import JSONLines
from paceline.metrics.live import RankBars, letters
from paceline.report.frame import read
from paceline.report.run import load
from paceline.report.sections import sections

NOW = 1e9 + 21.0


def _write(folder: Path, *, ranks: int = 2, last: int = 20, **facts: Any) -> None:
    """A run of 50 steps, 5 in each window of a second; the last rank is the slowest."""
    own_s = [0.06 + 0.1 * (rank + 1) / ranks for rank in range(ranks)]
    spent_s = [{"data": 0.02, "backward": own, "communication": 0.18 - own} for own in own_s]
    known = {"total_steps": 50, "restarts": 1} | facts
    write_folder(folder, spent_s, steps=last, window=5, **known)


def _shown(folder: Path, *, width: int = 100, silence_s: float = 1.0) -> str:
    for file in folder.glob("*.jsonl"):
        os.utime(file, (NOW - silence_s, NOW - silence_s))
    console = Console(file=io.StringIO(), width=width, highlight=False)
    with console.capture() as text:
        console.print(read(str(folder), NOW))
    assert all(len(line) <= width for line in text.get().splitlines())
    return text.get()


def test_a_running_job(tmp_path: Path) -> None:
    _write(tmp_path)
    shown = _shown(tmp_path)
    assert re.search(r"step 20/50 .*40%  0:00:30 left", shown)
    assert "epoch 1  40 samples/s  loss 0.05" in shown
    # 0.1 s wait for data, 0.55 s compute and 0.35 s communication; 0.1, 0.8 and 0.1 s on the other rank
    first, second = re.findall(r"^rank [01] ([=DC].*)", shown, re.MULTILINE)
    assert re.fullmatch(r"={27,28}D{5}C{17,18}    2\.0 GB  0\.5 cores", first)
    assert re.fullmatch(r"={40}D{5}C{5}    2\.0 GB  0\.5 cores", second)
    assert "= compute  D wait for data  C communication  . other" in shown
    assert "2 ranks  cpu" in shown
    assert "no checkpoint in this folder  1 restart" in shown


def test_tokens_are_counted_where_the_run_counts_them(tmp_path: Path) -> None:
    _write(tmp_path, tokens=5000)
    assert "5,000 tokens/s" in _shown(tmp_path)


def test_the_advice_of_the_report_is_shown_while_the_run_goes_on(tmp_path: Path) -> None:
    _write(tmp_path)
    first = load(str(tmp_path)).findings
    assert first
    assert first[0].kind == "straggler"
    assert f"advice: {first[0]}" in " ".join(_shown(tmp_path).split())


def test_saves_are_judged_as_by_the_training(tmp_path: Path) -> None:
    """They are in few of the windows, and none is in the newest ten."""
    write_folder(tmp_path, [{"data": 0.02, "backward": 0.18}], steps=150, window=5)
    path = tmp_path / record.FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[5:20:5]:
        line["spent_s"]["checkpoint"] = [10.0]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    advice = "checkpoints take 51 % of the time: save less often."
    assert advice in " ".join(_shown(tmp_path).split())


def test_one_stall_of_a_long_run_is_no_advice(tmp_path: Path) -> None:
    """The newest windows hold the whole stall, and a small part of the time until the next."""
    write_folder(tmp_path, [{"data": 0.02, "backward": 0.18}], steps=3000, window=5)
    path = tmp_path / record.FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-5]["spent_s"]["checkpoint"] = [5.0]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert load(str(tmp_path)).findings == []
    shown = _shown(tmp_path)
    assert "advice" not in shown
    assert "no bottleneck found" in shown


def test_there_is_no_advice_about_a_healthy_run_or_a_short_one(tmp_path: Path) -> None:
    _write(tmp_path / "a", ranks=1)
    assert "no bottleneck found" in _shown(tmp_path / "a")
    _write(tmp_path / "b", last=15)
    for sentence in ("no bottleneck found", "advice:"):
        assert sentence not in _shown(tmp_path / "b")


@pytest.mark.parametrize("width", [20, 40, 60, 200])
def test_lines_fit_the_terminal(tmp_path: Path, width: int) -> None:
    _write(tmp_path, ranks=3, script="a_script_with_a_rather_long_name.py")
    shown, _, _ = _shown(tmp_path, width=width).partition("advice:")
    assert shown.count("\n") < 15
    assert len(re.findall(r"^rank \d [=DC]{10,}", shown, re.MULTILINE)) == 3
    if width >= 40:  # the bar becomes shorter, not the texts
        assert re.search(r"^step 20/50 .* 40%  0:00:30 left", shown, re.MULTILINE)


def test_of_many_ranks_the_slowest_and_the_fastest_are_shown(tmp_path: Path) -> None:
    _write(tmp_path, ranks=4096, last=10)
    shown = _shown(tmp_path, width=60)
    ranks = [int(rank) for rank in re.findall(r"^rank +(\d+) ", shown, re.MULTILINE)]
    assert ranks == [*range(4095, 4088, -1), 0]
    assert "4,096 ranks" in shown


@pytest.mark.parametrize("shares", [[0, 0, 0], [1, 1, 1], [5e-9, 1, 0], [0.2, 0.3, 0.5]])
def test_letters_add_up(shares: list[float]) -> None:
    for length in range(1, 60):
        counts = letters(shares, length)
        assert sum(counts) == length
        assert min(counts) >= 0


def test_busy_gpus_and_those_that_do_not_tell() -> None:
    none = [0.0, 0.0]
    window = Window(
        step=1,
        steps=1,
        time=0.0,
        samples=1,
        spent_s=dict.fromkeys(PHASES, none),
        memory_bytes=none,
        busy=[0.87, -1.0],
    )
    console = Console(file=io.StringIO(), width=90)
    with console.capture() as text:
        console.print(RankBars(window, "cuda"))
    assert text.get().count("busy") == 1
    assert "87% busy" in text.get()


def test_silence_and_the_end(tmp_path: Path) -> None:
    _write(tmp_path)
    assert "no new line" not in _shown(tmp_path, silence_s=14)  # a line comes every 5 s
    assert "no new line for 16 s" in _shown(tmp_path, silence_s=16)
    clock = JSONLines(tmp_path / record.FILE)
    clock.log(20, {"end": "stopped early"})
    assert "ended: stopped early" in _shown(tmp_path, silence_s=1000)
    report = sections(load(str(tmp_path)))[0].text
    assert "The run has not reached its last step. The training ended: stopped early." in report
    clock.log(20, {"run": {"total_steps": 50}})  # it is started again
    clock.close()
    assert "ended" not in _shown(tmp_path)
    (tmp_path / "end").mkdir()
    _write(tmp_path / "end", last=50)
    assert "finished" in _shown(tmp_path / "end", silence_s=1000)
