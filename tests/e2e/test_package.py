"""The source distribution and the wheel: what is in them, and that an empty environment can install them."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch
import paceline
with paceline.join(device="cpu") as job:
    total = torch.ones(1)
    torch.distributed.all_reduce(total, group=job.group)
    print(f"rank {job.rank} of {job.world_size}: {total.item():g}")
"""


def _run(command: Sequence[str | Path], folder: Path) -> str:
    # Without this variable, because the package under test is the installed one.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _build(source: Path, kind: str, to: Path) -> Path:
    _run([sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", to], source)
    (built,) = to.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, as pip does it."""
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return _build(source, "wheel", tmp_path_factory.mktemp("wheel"))


def _files(*folders: str) -> set[str]:
    """The files of the repository in these folders, without caches."""
    return {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and ".raw." not in path.name
    }


@pytest.mark.ci
def test_the_wheel_has_the_package_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(n for n in names if n.endswith("/METADATA"))).decode()
    package = {name for name in names if not name.partition("/")[0].endswith(".dist-info")}
    assert package == {name.removeprefix("src/") for name in _files("src")}
    assert f"\nVersion: {paceline.__version__}\n" in metadata
    assert "\nRequires-Dist: torch" in metadata


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_empty_environment_can_install_and_run_it(sdist: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    binaries = tmp_path / "venv" / "bin"
    constraints = ROOT / "constraints.txt"
    pip = [binaries / "python", "-m", "pip", "--disable-pip-version-check"]
    # From the source distribution: pip builds the wheel in an environment of its own, as with `pip install .`
    _run([*pip, "install", "--no-cache-dir", "-c", constraints, sdist], tmp_path)
    _run([*pip, "check"], tmp_path)
    # The same build of torch as here: CPU only, where that is what is installed.
    code = "from importlib.metadata import version; print(version('torch'))"
    assert _run([binaries / "python", "-c", code], tmp_path).strip() == version("torch")
    assert "exit codes:" in _run([binaries / "paceline", "--help"], tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    out = _run([binaries / "paceline", "run", "--nproc-per-node=2", "train.py"], tmp_path)
    assert sorted(line.partition("rank ")[2] for line in out.splitlines()) == [
        "0 of 2: 2",
        "1 of 2: 2",
    ]
