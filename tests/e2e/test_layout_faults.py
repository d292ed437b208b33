"""A rank that dies under any layout is named and replaced, and the job ends where an undisturbed one ends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from launching import Finished, finish, start

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, os.environ["EXAMPLES"])
import gpt_3d

inner, calls = gpt_3d.token_loss, 0

def token_loss(model, batch):
    global calls
    calls += 1
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if calls == int(os.environ["AT"]) and os.environ["RANK"] == "1" and first:
        exec(os.environ.get("STRIKE", ""))
    return inner(model, batch)

gpt_3d.token_loss = token_loss
gpt_3d.main()
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
PREEMPT = "os.kill(os.getppid(), signal.SIGTERM)"
SHARDED, SPLIT, BOTH = "--dp-shard=2", "--tp=2", "--tp=2 --dp-shard=2"

slow = pytest.mark.slow


def _train(
    nproc: int, layout: str, folder: Path, launch: str = "", strike: str = "", at: int = 0
) -> Finished:
    """Three epochs of 25 steps, each saved. Rank 1 runs `strike` at its call `at` of the model."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    words = f"run --nproc-per-node={nproc} {launch} train.py --epochs=3 {layout}".split()
    return finish(start(words, folder, EXAMPLES=str(EXAMPLES), STRIKE=strike, AT=str(at)), 150)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = torch.load(folder / "runs/gpt_3d/model.pth")
    return weights


def _loss(done: Finished) -> float:
    found = re.search(r"loss ([\d.]+) on sums", done.out)
    assert found, done
    return float(found[1])


@pytest.mark.parametrize(
    ("nproc", "layout", "at"),
    [
        pytest.param(2, SHARDED, 80, marks=slow),
        pytest.param(2, SPLIT, 160, marks=slow),
        pytest.param(2, "", 80, marks=slow),
        pytest.param(4, BOTH, 80, marks=slow),
        pytest.param(4, "--dp-replicate=2 --dp-shard=2", 40, marks=slow),
        pytest.param(2, "--pp=2", 320, marks=slow),
    ],
)
def test_a_killed_rank_is_named_and_replaced(
    nproc: int, layout: str, at: int, tmp_path: Path
) -> None:
    calm = _train(nproc, layout, tmp_path / "calm")
    assert calm.code == 0, calm
    done = _train(nproc, layout, tmp_path / "struck", "--max-restarts=1", KILL, at)
    assert done.code == 0, done
    assert "rank 1 failed: killed by SIGKILL" in done.err
    assert _loss(done) == _loss(calm)
    torch.testing.assert_close(
        _weights(tmp_path / "struck"), _weights(tmp_path / "calm"), rtol=0, atol=0
    )


@pytest.mark.slow
def test_three_dimensions_on_eight_ranks_train_as_one_process(tmp_path: Path) -> None:
    calm = _train(1, "--epochs=1", tmp_path / "calm")
    assert calm.code == 0, calm
    cube = _train(8, "--pp=2 --tp=2 --dp-shard=2 --epochs=1", tmp_path / "cube")
    assert cube.code == 0, cube
    assert _loss(cube) == pytest.approx(_loss(calm), abs=2e-4)
    torch.testing.assert_close(
        _weights(tmp_path / "cube"), _weights(tmp_path / "calm"), rtol=1e-3, atol=1e-3
    )


@pytest.mark.slow
def test_a_preempted_job_goes_on_in_other_layouts(tmp_path: Path) -> None:
    calm = _train(1, "", tmp_path / "calm")
    assert calm.code == 0, calm
    folder = tmp_path / "moved"
    first = _train(4, BOTH, folder, strike=PREEMPT, at=60)
    assert first.code == 75, first
    second = _train(2, SPLIT, folder, "--max-restarts=0", KILL, 160)
    assert second.code == 137, second
    third = _train(3, "--dp-shard=3", folder)
    assert third.code == 0, third
    assert _loss(third) == pytest.approx(_loss(calm), rel=0.02)
    torch.testing.assert_close(_weights(folder), _weights(tmp_path / "calm"), rtol=0.02, atol=1e-3)


@pytest.mark.slow
def test_a_hang_names_the_axis_of_the_mesh(tmp_path: Path) -> None:
    found = _train(
        4, BOTH, tmp_path, "--hang-after=5 --on-hang=end", "os.kill(os.getpid(), 19)", 20
    )
    assert found.code != 0, found
    assert re.search(
        r"hang: rank 3 .* has waited \d+ s in all_gather .*group of ranks 1 and 3 on axis dp_shard",
        found.err,
    ), found.err
    assert re.search(r"\n      rank 1 .* has not entered it", found.err), found.err
