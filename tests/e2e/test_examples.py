"""What a newcomer runs: every example, alone and on two ranks, through the installed command."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launching import wait_until

ROOT = Path(__file__).parents[2]
PACELINE = [sys.executable, "-m", "paceline", "run", "--nproc-per-node"]


def _run(command: list[str], folder: Path, timeout_s: float = 100) -> str:
    environ = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _accuracy(output: str) -> float:
    found = re.search(r"accuracy ([\d.]+) % on 360 images$", output.strip().splitlines()[-1])
    assert found, output
    return float(found[1])


def _example(name: str) -> str:
    return str(ROOT / "examples" / name)


@pytest.mark.ci
def test_the_demo(tmp_path: Path) -> None:
    output = _run([*PACELINE, "2", _example("digits.py")], tmp_path)
    assert _accuracy(output) >= 97
    lines = [json.loads(x) for x in (tmp_path / "runs/demo/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert (tmp_path / "runs/demo/model.pth").exists()


@pytest.mark.slow
@pytest.mark.parametrize("nproc", ["1", "2"])
def test_own_loop_resumes(nproc: str, tmp_path: Path) -> None:
    run = [*PACELINE, nproc, _example("own_loop.py"), "--epochs"]
    assert _accuracy(_run([*run, "2"], tmp_path)) >= 30
    assert _accuracy(_run([*run, "8"], tmp_path)) >= 95
    text = (tmp_path / "runs/own_loop/metrics.jsonl").read_text()
    steps = [json.loads(line)["step"] for line in text.splitlines()]
    assert steps == list(range(1, len(steps) + 1))


def _without_docstring(name: str) -> list[str]:
    return Path(_example(name)).read_text().split('"""', 2)[2].lstrip("\n").splitlines()


def test_the_page_of_ports_shows_how_before_becomes_after() -> None:
    page = (ROOT / "docs" / "howto" / "port.md").read_text()
    lines = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)[0].splitlines()
    assert [line[1:] for line in lines if line[:1] != "+"] == _without_docstring("before.py")
    assert [line[1:] for line in lines if line[:1] != "-"] == _without_docstring("after.py")


@pytest.mark.slow
def test_a_ported_program_trains_the_same_on_any_number_of_processes(tmp_path: Path) -> None:
    losses, printed = [], []
    for nproc in ("1", "2", "3"):
        folder = tmp_path / nproc
        folder.mkdir()
        printed.append(_run([*PACELINE, nproc, _example("after.py")], folder).replace("[0] ", ""))
        lines = (folder / "runs/after/metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
        assert (folder / "model.pth").exists()
    assert len(losses[0]) == 5 * 23
    for each in losses[1:]:
        assert each == pytest.approx(losses[0], rel=1e-5)  # rounding, over 115 steps
    assert printed[0] == printed[1] == printed[2]


@pytest.mark.slow
def test_the_program_before_its_port_learns(tmp_path: Path) -> None:
    output = _run([sys.executable, _example("before.py")], tmp_path)
    assert float(output.split()[-1]) >= 0.9
    assert (tmp_path / "model.pth").exists()


@pytest.mark.slow
def test_char_lm_learns(tmp_path: Path) -> None:
    output = _run([*PACELINE, "2", _example("char_lm.py"), "--epochs", "2"], tmp_path)
    losses = [float(x) for x in re.findall(r"epoch \d+: ([\d.]+) nats", output)]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 4.6  # log 100: it knows more than which characters there are


@pytest.mark.parametrize("nproc", [pytest.param("1", marks=pytest.mark.slow), "2"])
@pytest.mark.ci
def test_the_program_of_the_page_of_trainer(nproc: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "howto" / "trainer.md").read_text()
    (tmp_path / "train.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    output = _run([*PACELINE, nproc, "train.py"], tmp_path)
    found = re.search(r"accuracy (0\.\d+) after 710 steps", output)
    assert found, output
    assert float(found[1]) > 0.9


@pytest.mark.parametrize("options", [[], pytest.param(["--trainer"], marks=pytest.mark.slow)])
@pytest.mark.ci
def test_a_starter_script_trains_and_resumes(tmp_path: Path, options: list[str]) -> None:
    init = [sys.executable, "-m", "paceline", "init", *options, "go.py"]
    assert "paceline run --nproc-per-node 2 go.py" in _run(init, tmp_path)
    again = subprocess.run(init, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 73
    assert "go.py exists, and is not overwritten." in again.stderr
    assert "paceline run --nproc-per-node 2 go.py" in (tmp_path / "go.py").read_text()
    outputs = [_run([*PACELINE, "2", "go.py"], tmp_path) for _ in range(2)]
    found = [re.search(r"accuracy ([\d.]+) on 500 samples", output) for output in outputs]
    assert all(each is not None and float(each[1]) > 0.95 for each in found), outputs
    assert len((tmp_path / "runs/go/metrics.jsonl").read_text().splitlines()) == 320
    assert (tmp_path / "runs/go/model.pth").exists()


@pytest.mark.slow
def test_finetuning_gives_the_same_loss_on_any_ranks_and_with_fsdp(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    losses, scores = [], []
    for ranks, options in (("1", []), ("2", []), ("2", ["--fsdp"])):
        folder = tmp_path / f"{ranks}{'-'.join(options)}"
        words = [*PACELINE, ranks, _example("finetune.py"), "--epochs=1", f"--folder={folder}"]
        output = _run([*words, *options], tmp_path)
        assert len(list((folder / "pretrained").glob("model-*.safetensors"))) > 1
        found = re.search(r"loss ([\d.]+) on 200 lines", output)
        assert found, output
        scores.append(float(found[1]))
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0][-1] < losses[0][0] - 1
    # float32, and Adam divides by small numbers.
    assert scores == pytest.approx([scores[0]] * 3, rel=2e-3)
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-3)


PARAMETER_SERVER = [_example("parameter_server.py"), "--servers=2", "--snapshot-every=100"]


def _check_parameter_server(output: str, steps: int) -> None:
    found = re.search(r"accuracy ([\d.]+) % after (\d+) steps, at most (\d) ahead", output)
    assert found, output
    assert int(found[2]) >= steps
    assert float(found[1]) > 85
    assert int(found[3]) <= 4


@pytest.mark.ci
def test_the_parameter_server(tmp_path: Path) -> None:
    output = _run([*PACELINE, "4", *PARAMETER_SERVER, "--steps=600"], tmp_path)
    _check_parameter_server(output, 600)
    # Started again, with other numbers of servers and workers, it continues from the snapshot.
    again = [_example("parameter_server.py"), "--servers=1", "--steps=650"]
    _check_parameter_server(_run([*PACELINE, "2", *again], tmp_path), 650)


@pytest.mark.slow
def test_a_parameter_server_restarts_after_a_worker_was_killed(tmp_path: Path) -> None:
    command = [*PACELINE, "4", "--max-restarts=1", *PARAMETER_SERVER, "--steps=800"]
    run = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stderr is not None
    pids = re.search(r"pids ([\d ]+)", run.stderr.readline())
    assert pids
    snapshot = tmp_path / "runs/parameter_server/snapshot.pt"
    wait_until(snapshot.exists, run)
    done = torch.load(snapshot)["done"]
    assert 0 < done < 800
    os.kill(int(pids[1].split()[-1]), signal.SIGKILL)
    output, errors = run.communicate(timeout=100)
    assert run.returncode == 0, errors
    _check_parameter_server(output, 800)


@pytest.mark.slow
def test_ranks_without_a_launcher_outlive_a_killed_worker(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    options = ["--steps=600", "--lost-s=2"]
    ranks = [
        subprocess.Popen(
            [sys.executable, *PARAMETER_SERVER, *options],
            cwd=tmp_path,
            env=os.environ | variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    wait_until((tmp_path / "runs/parameter_server/snapshot.pt").exists, ranks[0])
    ranks[3].kill()
    output, _ = ranks[0].communicate(timeout=100)
    _check_parameter_server(output, 600)
    assert "worker 3 is left out" in output
    for rank in ranks[1:]:
        rank.communicate(timeout=30)
        assert rank.returncode != 0
