"""Reports of run folders: whole, damaged, unfinished, old, of many ranks, and not of a run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from run_folders import write_folder

from paceline.cli import report as command
from paceline.clock import record
from paceline.clock.record import Window
from paceline.clock.step_clock import PHASES
from paceline.errors import ConfigError
from paceline.exit_codes import ExitCode
from paceline.metrics.json_lines import JSONLines
from paceline.report.page import to_html, to_markdown
from paceline.report.run import load, thin_windows
from paceline.report.sections import sections, title

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def write_run(
    folder: Path,
    *,
    steps: int = 100,
    ranks: int = 2,
    window: int = 10,
    data_s: float = 0.001,
    **run: Any,
) -> None:
    """A run whose last rank needs 3 ms more for each forward, while the others wait for it."""
    usual = {"data": data_s, "forward": 0.002, "communication": 0.003 * (ranks > 1)}
    last = {"data": data_s, "forward": 0.005}
    spent_s = [*[usual] * (ranks - 1), last]
    write_folder(folder, spent_s, steps=steps, window=window, **run)


def _markdown(folder: Path) -> str:
    run = load(str(folder))
    return to_markdown(title(run), sections(run))


def test_a_whole_run(tmp_path: Path) -> None:
    write_run(tmp_path, script="train.py", workers=2)
    assert load(str(tmp_path)).missing == []
    text = _markdown(tmp_path)
    for line in (
        "# Paceline report: train.py",
        f"| folder | {tmp_path} |",
        "| steps | 100 of 100 |",
        "| data | 1 | 16.7 % |",  # ms of a step
        "| 1 | 0.01 | 1 | 0.01 |",  # the loss
        "| 0 | 3 | 3 | 0.50 | 1.9 GiB |",  # a rank
        "| workers | 2 |",
        "| starts | 1 |",
    ):
        assert line in text.splitlines(), line
    slow = "rank 1 is slow: the others wait 3 ms in each step of 6 ms"
    assert text.count(slow) == 2  # in the summary, and above the ranks


def test_a_run_without_its_fields_is_shown(tmp_path: Path) -> None:
    """The line that describes a run may be of an older version."""
    write_run(tmp_path, flops=1e9)
    path = tmp_path / record.FILE
    _, *lines = path.read_bytes().splitlines(keepends=True)
    for run in ({}, {"flops": 1e9}, {"strategy": "DDP"}):
        first = json.dumps({"step": 0, "run": run}).encode() + b"\n"
        path.write_bytes(b"".join([first, *lines]))
        assert "rank 1 is slow" in _markdown(tmp_path)


def test_a_further_loop_in_one_process_is_no_restart(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = tmp_path / record.FILE
    lines = path.read_bytes().splitlines(keepends=True)
    for run, restarts in (({"time": 1e9 + 41}, 1), ({"time": 1e9 + 41, "loop": 1}, 0)):
        start = json.dumps({"step": 40, "run": run}).encode() + b"\n"
        path.write_bytes(b"".join([*lines[:5], start, *lines[5:]]))
        assert len(load(str(tmp_path)).restarts) == restarts


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    write_run(tmp_path, steps=50, total_steps=345)
    os.utime(tmp_path / "metrics.jsonl", (0, 0))  # the newer of the two files counts
    text = _markdown(tmp_path)
    assert "| steps | 50 of 345 |" in text
    assert "The run has not reached its last step." in text
    assert "| last line written | 20" in text


def test_the_verdict_is_about_what_was_judged(tmp_path: Path) -> None:
    write_run(tmp_path / "a", ranks=1, data_s=0.0005)
    text = _markdown(tmp_path / "a")
    assert "No bottleneck found. Checked: data, slow ranks, " in text
    # Ten windows, but three since the newest start.
    clock = JSONLines(tmp_path / "a" / record.FILE)
    clock.log(70, {"run": {"time": 1e9 + 70}})
    clock.close()
    path = tmp_path / "a" / record.FILE
    *lines, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:8], last, *lines[8:]]))
    text = _markdown(tmp_path / "a")
    assert "The time since the last start is too short for advice." in text
    assert "limits the run" not in text
    path.unlink()
    text = _markdown(tmp_path / "a")
    assert "advice" not in text
    assert "it is not known where its time went" in text


def test_files_that_are_empty_or_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (record.FILE, "metrics.jsonl"):
        (tmp_path / name).touch()
    assert load(str(tmp_path)).missing == [
        "No step has been measured yet.",
        "There are no logged values: metrics.jsonl is missing or empty.",
    ]
    write_run(tmp_path)

    def refuse(path: Path, *args: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=f"{record.FILE} cannot be read: Permission denied"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("metrics.jsonl", {"step": "5"}),
        ("metrics.jsonl", {"step": 1.5}),
        ("metrics.jsonl", [1]),
        (record.FILE, {"spent_s": {"unknown": [1.0, 1.0]}}),
        (record.FILE, {"spent_s": {"data": [1.0]}}),
        (record.FILE, {"busy": [0.5]}),
        (record.FILE, {"steps": 0}),
        (record.FILE, {"samples": float("inf")}),
    ],
)
def test_lines_of_another_form_are_left_out(tmp_path: Path, name: str, line: Any) -> None:
    write_run(tmp_path)
    path = tmp_path / name
    last = json.loads(path.read_text().splitlines()[-1])
    with path.open("a") as file:
        file.write(json.dumps(last | line if isinstance(line, dict) else line) + "\n")
    assert f"Damaged and left out: 1 line of {name}." in _markdown(tmp_path)


@pytest.mark.ci
def test_a_long_run_is_a_small_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed")
    write_run(tmp_path, steps=100_000, window=100)
    run = load(str(tmp_path))
    page = to_html("<long>", sections(run))
    assert len(page.encode()) < 5e6
    assert "&lt;long&gt;" in page
    assert "<long>" not in page
    assert not re.search(r'(src|href)="(https?:)?//', page)
    specs = json.loads(page.rpartition("const charts = ")[2].partition(";\nconst dark")[0])
    assert len(specs["chart1"]["data"]["values"]) <= 600
    # Each chart has its place, a name, and a table.
    for name in specs:
        assert re.search(rf'<figure role="img" aria-label="[^"]+"><div id="{name}">', page)
    assert command.main([str(tmp_path)]) == ExitCode.OK
    assert "report.html (" in capsys.readouterr().out


def test_a_checkpoint_that_the_run_has_just_removed_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path)
    listed = iter([[1, 3], [1], [1]])
    monkeypatch.setattr("paceline.report.run.committed", lambda store: next(listed))
    run = load(str(tmp_path))
    assert run.checkpoints == []
    (damaged,) = [line for line in run.missing if line.startswith("The checkpoint of step ")]
    assert "step 1 " in damaged


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [500, 1400])  # Chromium makes no smaller window
def test_every_chart_is_drawn_and_the_console_is_empty(tmp_path: Path, width: int) -> None:
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed")
    write_run(tmp_path, steps=200, ranks=3)
    parts = sections(load(str(tmp_path)))
    page = tmp_path / "report.html"
    page.write_text(to_html("a", parts))
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
            *(f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900"),
            *("--virtual-time-budget=8000", "--dump-dom", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    charts = sum(section.chart is not None for section in parts)
    assert charts == 4
    drawn = re.findall(r'<svg [^>]*class="marks"[^>]*>', done.stdout)
    assert len(drawn) == charts
    # On a phone a chart has the width of the page; on a screen two are side by side.
    widths = [int(found[1]) for svg in drawn if (found := re.search(r' width="(\d+)"', svg))]
    columns = width // 600 or 1
    assert all(0.7 * width < columns * each <= width for each in widths), widths


def _window(step: int, ranks: int) -> Window:
    zeros = [0.0] * ranks
    spent = dict.fromkeys(PHASES, zeros)
    return Window(
        step=step, steps=10, time=0.0, samples=1, spent_s=spent, memory_bytes=zeros,
        busy=zeros,
    )  # fmt: skip


def test_no_window_of_a_chart_is_lost_when_the_number_of_ranks_changes() -> None:
    windows = [_window(10 * i, ranks=3 if i <= 250 else 2) for i in range(1, 501)]
    thin = thin_windows(windows)
    assert len(thin) < 250
    assert sum(window.steps for window in thin) == 5000
    assert {window.num_ranks for window in thin} == {2, 3}
    assert thin_windows([]) == []
