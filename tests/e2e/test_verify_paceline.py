"""`paceline verify` on scripts that use paceline: equal on 1 and N processes, or the difference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

SCRIPT = """
import torch, paceline
from torch.utils.data import Dataset

class Points(Dataset):
    def __len__(self): return 60
    def __getitem__(self, i):
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return x, x.sum()

with paceline.join(seed=3) as job:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model = {wrapped}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = paceline.Batches(job, Points(), global_batch=12, micro_batch=4, workers={workers})
    training = paceline.Training(
        job, model, optimizer, batches, checkpoints=paceline.Checkpoints("mine", every_steps=2)
    )
    for step in training.steps({bound}):
        for x, y in step:
            loss = (model(x).squeeze(1) - y).square().sum()
            {loss}
            step.backward(loss, count=len(y), reduction="sum")
        {before}
        step.update()
        {after}
    def score(model, batch):
        error = (model(batch[0]).squeeze(1) - batch[1]).abs().sum() {score}
        return {{"error": (error, len(batch[1]))}}
    paceline.evaluate(job, model, Points(), score)
    training.export("weights.pth", number=0)
"""
PLAIN = {
    "wrapped": "paceline.ddp(job, net)",
    "workers": 0, "bound": "epochs=9", "loss": "", "before": "", "after": "", "score": "",
}  # fmt: skip


def verify(folder: Path, *words: str, **parts: Any) -> tuple[int, dict[str, Any]]:
    (folder / "train.py").write_text(SCRIPT.format(**(PLAIN | parts)))
    return run(folder, *words, "train.py")


def run(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "verify", "--json", "--steps", "40", *words],
        cwd=folder,
        env=os.environ | {"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def passed(found: dict[str, Any]) -> dict[str, str]:
    """The evidence of each check that passed."""
    return {each["rule"]: each["evidence"] for each in found["passed"]}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_same_bits_on_one_two_and_three(tmp_path: Path) -> None:
    code, facts = verify(tmp_path, "--bitwise", "--nproc", "1,2,3")
    assert code == 0
    for processes, found in zip((2, 3), facts["audits"], strict=True):
        assert (found["nproc"], found["faults"], found["not_seen"]) == (processes, [], [])
        times = 40 * 4 * processes  # 4 parameters
        assert passed(found)["parameter"] == f"{times} compared, all bits are equal."
    # It neither resumes from nor writes to the user's folders.
    left = {path.name for path in tmp_path.iterdir()}
    assert {name for name in left if not name.startswith("torchinductor")} == {"train.py"}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("bound", "after", "trains_on"),
    [
        ("epochs=9, until=41", "", True),
        ("epochs=8", "", False),
        ("epochs=9", "if step.number == 40: step.stop()", False),
    ],
)
def test_a_script_that_trains_on_is_named(
    bound: str, after: str, trains_on: bool, tmp_path: Path
) -> None:
    # 5 steps an epoch, of which 40 are watched.
    code, facts = verify(tmp_path, bound=bound, after=after)
    assert code == 0
    notes = [
        "the script trains on after the 40 steps that were watched, and a fault that comes later is not "
        "seen. --steps 400 watches more."
    ]
    assert facts["remarks"][1:] == notes * trains_on
    assert facts["remarks"][0].startswith("dropout is off")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_within_rounding_by_default_and_without_compilation(tmp_path: Path) -> None:
    code, facts = verify(tmp_path, workers=2, wrapped="paceline.ddp(job, torch.compile(net))")
    (found,) = facts["audits"]
    assert (code, found["faults"], found["not_seen"]) == (0, [], [])
    note = "torch.compile was turned off during verification (first call: train.py:1"
    assert note in facts["remarks"][0]
    assert passed(found)["loss"].startswith("40 compared, the largest relative difference is ")


DROPOUT = {
    "wrapped": "paceline.ddp(job, torch.nn.Sequential(net, torch.nn.Dropout(0.1)))\n"
    "    from torch.nn.functional import dropout as drop",
}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("words", [(), ("--bitwise",)])
def test_dropout_is_compared(words: tuple[str, ...], tmp_path: Path) -> None:
    loss = "loss = drop(loss.expand(9), 0.5).mean()"
    code, facts = verify(tmp_path, *words, loss=loss, **DROPOUT)
    (found,) = facts["audits"]
    assert (code, found["faults"], found["not_seen"]) == (0, [], [])
    assert passed(found)["loss"].startswith("40 compared")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_reproducible_mode_refuses_is_said_in_a_sentence(tmp_path: Path) -> None:
    net = "torch.nn.Sequential(net, torch.nn.BatchNorm1d(1))"
    code, facts = verify(
        tmp_path, "--bitwise", wrapped=f"paceline.ddp(job, paceline.sync_batchnorm(job, {net}))"
    )
    assert code == 3
    assert (
        "reproducible training normalises each micro-batch separately, not over ranks"
        in facts["what"]
    )
    assert facts["why"] == "--bitwise turns reproducible mode on."
    assert "train.py:" in facts["where"]
    assert facts["fix"] == "leave --bitwise out."


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_other_wrong_input_is_not_blamed_on_bitwise(tmp_path: Path) -> None:
    text = SCRIPT.format(**PLAIN).replace(
        "optimizer, batches,", "optimizer, batches, precision='fp17',"
    )
    (tmp_path / "train.py").write_text(text)
    code, facts = run(tmp_path, "--bitwise", "train.py")
    assert code == 3
    assert "ConfigError: precision must be fp32" in facts["what"]
    assert not facts["fix"]


FAULTS = [
    ("parameter of ranks", 1, "0.weight", {"before": "optimizer.param_groups[0]['lr'] *= 1 + job.rank"}),
    ("loss", 2, "", {"before": "optimizer.param_groups[0]['lr'] *= job.world_size"}),
    (
        "parameter of ranks",
        4,
        "2.bias",
        {"before": "if job.rank == 1 and step.number == 4:\n            net[2].bias.data.add_(0.1)"},
    ),
    (
        "loss",
        1,
        "",
        {"loss": "loss = loss * (1 + job.rank)", "wrapped": "torch.compile(paceline.ddp(job, net))"},
    ),
    ("evaluation", 20, "error", {"score": "* (1 + job.rank)"}),
    ("loss", 1, "", {"loss": "loss = loss * (1 + 10 * job.rank)", **DROPOUT}),
]  # fmt: skip


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("quantity", "step", "name", "parts"),
    [pytest.param(*fault, id=f"{fault[0]}-{at}", marks=[] if at == 0 else [pytest.mark.slow])
     for at, fault in enumerate(FAULTS)],
)  # fmt: skip
@pytest.mark.ci
def test_the_first_difference_is_named(
    quantity: str, step: int, name: str, parts: dict[str, str], tmp_path: Path
) -> None:
    # The rates of some of these grow in each step.
    code, facts = verify(tmp_path, "--steps", "20", **parts)
    (found,) = facts["audits"][0]["faults"]
    assert (code, found["rule"], found["step"]) == (1, quantity, step)
    between = "rank 0 and rank 1" if quantity == "parameter of ranks" else "1 and 2 processes"
    kind = "parameter" if quantity == "parameter of ranks" else quantity
    assert f"{kind} {name}".strip() + f" differs between {between}." in found["what"]
    assert found["effect"].startswith("relative difference ")
    assert found["at"].startswith("train.py:")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_number_of_steps_that_depends_on_the_processes_is_refused(tmp_path: Path) -> None:
    code, facts = verify(tmp_path, bound="until=12 // job.world_size")
    assert code == 3
    assert "makes 12 steps and 1 evaluation with 1 process and 6 steps" in facts["what"]


@pytest.mark.ci
def test_the_start_script_of_paceline_is_not_the_users(tmp_path: Path) -> None:
    """A rank is a fork of the command, so the command's own frames are below those of the script."""
    start, script = tmp_path / "paceline", tmp_path / "defines.py"
    start.write_text("import sys\nfrom paceline.cli.main import main\nsys.exit(main())\n")
    script.write_text("import paceline\n")
    done = subprocess.run(
        [sys.executable, str(start), "verify", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "why:   it called no backward." in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        pytest.param("1,2", "--pp=2", marks=pytest.mark.slow),
        pytest.param("1,2", "--dp-shard=2", marks=pytest.mark.slow),
        pytest.param("1,4", "--tp=2 --dp-shard=2", marks=pytest.mark.slow),
        pytest.param("1,4", "--pp=2", marks=pytest.mark.slow),
    ],
)
def test_layouts_against_one_process(processes: str, layout: str, tmp_path: Path) -> None:
    words = ["--nproc", processes, "--steps", "6", str(EXAMPLES / "gpt_3d.py")]
    code, facts = run(tmp_path, *words, *layout.split(), "--epochs=1")
    (found,) = facts["audits"]
    assert (code, found["faults"]) == (0, [])
    assert {"loss", "gradient norm", "weights at the start", "samples of a step"} <= set(
        passed(found)
    )
    assert passed(found)["loss"].startswith("6 compared")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["own_loop", "digits", "char_lm"])
@pytest.mark.parametrize("how", ["--bitwise", "--rtol=0.02"])
def test_every_example_of_ours(name: str, how: str, tmp_path: Path) -> None:
    # 0.02, since one of them trains in bf16, where each rounding is by up to 0.004.
    code, facts = run(tmp_path, how, "--nproc", "1,2,3", str(EXAMPLES / f"{name}.py"))
    assert (code, facts["steps"]) == (0, 40)
    for found in facts["audits"]:
        assert not found["faults"]
        # One of them has no evaluation.
        assert how != "--bitwise" or {each["rule"] for each in found["not_seen"]} <= {"evaluation"}
        assert "parameter" in passed(found) or how != "--bitwise"
