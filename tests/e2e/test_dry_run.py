"""`paceline run --dry-run`: two steps of one rank of a job whose other ranks do not exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import Finished, finish, start

EXAMPLES = Path(__file__).parents[2] / "examples"

SCRIPT = """
import paceline, torch
from torch import nn
from torch.utils.data import TensorDataset

data = TensorDataset(torch.ones(64, 8))
with paceline.join(seed=1) as job:
    model = paceline.fsdp(job, nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
    optimizer = torch.optim.AdamW(model.parameters())
    batches = paceline.Batches(job, data, global_batch=32)
    folder = paceline.Checkpoints("checkpoints", every_steps=1)
    training = paceline.Training(job, model, optimizer, batches, checkpoints=folder)
    training.report("run")
    for step in training.steps(epochs=100):
        for micro in step:
            step.backward(model(*micro).square().mean())
        step.update()
        training.export("weights.pth")
        print("step", step.number, "of rank", job.rank, "of", job.world_size)
    print("the end")
"""


def _run(words: list[str], folder: Path) -> Finished:
    return finish(start(["run", *words], folder))


def test_a_rank_does_two_steps_and_leaves_no_trace(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = _run(["--dry-run", "16:5", "train.py"], tmp_path)
    assert ended.code == 0, ended.err
    assert "step 2 of rank 5 of 16" in ended.out
    assert "step 3" not in ended.out
    assert "the end" not in ended.out
    # Ranks 0 to 7 have one of the 8 rows of each weight and bias: 4 * (8 + 1) numbers of 4 bytes.
    assert "144 B of 1 KiB" in ended.out
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.ci
@pytest.mark.parametrize("layout", ["", "--dp-shard 64", "--tp 2 --dp-shard 8 --dp-replicate 4"])
def test_layouts(layout: str, tmp_path: Path) -> None:
    words = ["--dry-run", "64:9", "--nproc-per-node", "8", str(EXAMPLES / "gpt_3d.py")]
    ended = _run([*words, *layout.split()], tmp_path)
    assert ended.code == 0, ended.err
    assert "dry run of rank 9 of 64" in ended.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("degree", "what"),
    [("--tp", "needs a multiple of 4 ranks"), ("--pp", "a pipeline cannot be run")],
)
def test_a_layout_that_cannot_be_run_is_an_error(degree: str, what: str, tmp_path: Path) -> None:
    ranks = "6" if degree == "--tp" else "8"
    ended = _run(["--dry-run", ranks, str(EXAMPLES / "gpt_3d.py"), degree, "4"], tmp_path)
    assert ended.code != 0
    assert what in ended.err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--dry-run", "many"], "must be N or N:RANK"),
        (["--dry-run", "4:4"], "rank 4 is not below the 4 ranks"),
        (["--dry-run", "0"], "rank 0 is not below the 0 ranks"),
        (["--dry-run", "4", "--nproc-per-node", "3"], "3 does not divide the 4 ranks"),
    ],
)
def test_wrong_numbers(words: list[str], what: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('started')")
    ended = _run([*words, "train.py"], tmp_path)
    assert ended.code == 2
    assert what in ended.err
