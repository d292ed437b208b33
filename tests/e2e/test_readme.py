"""The port that the README shows as a diff."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import DEADLINE_S, finish, start, wait_until

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
(DIFF,) = re.findall(r"```diff\n(.*?)```", TEXT, re.DOTALL)
STEPS_PER_EPOCH = 63  # 4,000 samples, 64 in a step


def _program(signs: str, epochs: int | None = None) -> str:
    """The context lines of the diff and those with these signs; with another number of epochs."""
    lines = [line for line in DIFF.splitlines() if line[:1] in ("", " ", *signs)]
    program = "\n".join(line[1:] for line in lines) + "\n"
    return program if epochs is None else re.sub(r"200(?=\):)", str(epochs), program)


def _losses(folder: Path) -> list[float]:
    lines = (folder / "runs/port/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [json.loads(line)["loss"] for line in lines]


def test_the_result_of_the_diff_is_an_example() -> None:
    example = (ROOT / "examples" / "port.py").read_text().split('"""', 2)[2]
    assert _lines(example) == _lines(_program("+"))


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


@pytest.mark.ci
def test_the_program_before_the_port_runs() -> None:
    subprocess.run([sys.executable, "-c", _program("-", epochs=1)], check=True, timeout=DEADLINE_S)


@pytest.mark.ci
def test_the_port_logs_the_same_losses_on_one_and_two_ranks(tmp_path: Path) -> None:
    losses = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        (folder / "train.py").write_text(_program("+", epochs=2))
        done = finish(start(["run", f"--nproc-per-node={ranks}", "train.py"], folder))
        assert done.code == 0, done.err
        losses.append(_losses(folder))
    assert len(losses[0]) == 2 * STEPS_PER_EPOCH
    assert losses[0][-1] < losses[0][0] / 2
    assert losses[1] == pytest.approx(
        losses[0], rel=1e-3
    )  # float32, and Adam divides by small numbers


@pytest.mark.slow
def test_the_port_resumes_when_a_rank_is_killed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_program("+", epochs=50))
    words = ["run", "--nproc-per-node=2", "--max-restarts=3", "train.py"]
    job = start(words, tmp_path)
    wait_until(lambda: list((tmp_path / "runs/port/checkpoints").glob("step-*")), job)
    assert job.stderr is not None
    pids = job.stderr.readline().split("pids ")[1].split()
    os.kill(int(pids[1]), signal.SIGKILL)
    done = finish(job)
    assert done.code == 0, done.err
    assert "rank 1 failed: killed by SIGKILL" in done.err
    assert re.search(r"resumed after step \d+", done.err)
    assert len(_losses(tmp_path)) == 50 * STEPS_PER_EPOCH
