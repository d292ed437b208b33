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
    assert "144 B on this rank, 1 KiB unsharded" in ended.out
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.ci
@pytest.mark.parametrize(
    "layout",
    ["", "--dp-shard 64", "--tp 2 --dp-shard 8 --dp-replicate 4", "--pp 2 --tp 2 --dp-shard 8"],
)
def test_layouts(layout: str, tmp_path: Path) -> None:
    words = ["--dry-run", "64:9", "--nproc-per-node", "8", str(EXAMPLES / "gpt_3d.py")]
    ended = _run([*words, *layout.split()], tmp_path)
    assert ended.code == 0, ended.err
    assert "dry run of rank 9 of 64" in ended.out
    assert not list(tmp_path.iterdir())


@pytest.mark.ci
def test_a_layout_that_cannot_be_run_is_an_error(tmp_path: Path) -> None:
    ended = _run(["--dry-run", "6", str(EXAMPLES / "gpt_3d.py"), "--tp", "4"], tmp_path)
    assert ended.code != 0
    assert "needs a multiple of 4 ranks" in ended.err


PIPELINE = """
import sys
import paceline, torch
from torch import nn
from torch.utils.data import TensorDataset

class Reads(nn.Linear):
    def forward(self, x):
        return super().forward(x) * x.sum().item()

schedule, first = sys.argv[1:]
data = TensorDataset(torch.ones(64, 8))
layers = [Reads(8, 16) if first == "reads" else nn.Linear(8, 16)]
layers += [nn.Linear(16, 32), nn.Linear(32, 64), nn.Linear(64, 8)]
split = ["1", "2", "3"] if schedule == "interleaved" else "2"
with paceline.join(seed=1, mesh=paceline.Mesh(pp=2, dp_shard=-1)) as job:
    model = paceline.pipeline(job, nn.Sequential(*layers), schedule=schedule, split=split)
    model = paceline.fsdp(job, model, blocks=[], param_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = paceline.Batches(job, data, global_batch=32, micro_batch=4)
    for step in paceline.Training(job, model, optimizer, batches).steps(epochs=100):
        step.run(lambda batch: model(*batch).square().mean())
        step.update()
        print("step", step.number)
"""


@pytest.mark.parametrize(
    ("rank", "schedule", "held"),
    [
        # Parameters [32, 64], [64], [64, 8] and [8] over 2 ranks.
        (2, "1f1b", "5 KiB on this rank, 10 KiB unsharded"),
        pytest.param(0, "1f1b", "1 KiB on this rank, 3 KiB unsharded", marks=pytest.mark.ci),
        pytest.param(2, "gpipe", "5 KiB on this rank, 10 KiB unsharded", marks=pytest.mark.ci),
        pytest.param(2, "interleaved", "2 KiB on this rank, 4 KiB unsharded", marks=pytest.mark.ci),
        pytest.param(
            2, "zero_bubble", "5 KiB on this rank, 10 KiB unsharded", marks=pytest.mark.ci
        ),
    ],
)
def test_a_stage_of_a_pipeline(rank: int, schedule: str, held: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PIPELINE)
    ended = _run(["--dry-run", f"4:{rank}", "train.py", schedule, "plain"], tmp_path)
    assert ended.code == 0, ended.err
    assert "step 1" in ended.out
    assert f"dry run of rank {rank} of 4" in ended.out
    assert held in ended.out


@pytest.mark.ci
def test_a_stage_that_depends_on_values_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PIPELINE)
    ended = _run(["--dry-run", "4:2", "train.py", "1f1b", "reads"], tmp_path)
    assert ended.code != 0
    assert "`forward` must not read any, as `x.item()`" in ended.err


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
