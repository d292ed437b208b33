"""One example under every launcher: two ranks give the losses of `paceline run`, bit for bit.

`paceline verify` compares every example with one process in test_verify_paceline.py; test_ray.py and
test_notebooks.py have the launchers that are programs in Python.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hosts import hosts, missing_tool
from launching import finish, spawn
from slurm_cluster import cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OPENMPI = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
LAUNCHERS = {
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    ],
    "OpenMPI": [*OPENMPI, sys.executable],
    "MPICH": ["mpiexec.hydra", "-n", "2", sys.executable],
}
SRUN = {
    "ranks": ["srun", "-N2", "-n2", sys.executable],
    "launchers": ["srun", "-N2", "-n2", sys.executable, "-m", "paceline", "run"],
}
SCRIPT = [str(Path(__file__).resolve().parents[2] / "examples" / "own_loop.py"), "--epochs=1"]


def _losses(words: Sequence[str], cwd: Path, **variables: str) -> list[float]:
    # The number of threads decides how sums round.
    end = finish(spawn([*words, *SCRIPT], cwd, own_group=True, OMP_NUM_THREADS="1", **variables))
    assert end.code == 0, end.out + end.err
    return _written(cwd)


def _written(cwd: Path) -> list[float]:
    lines = (cwd / "runs/own_loop/metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, lines)]
    assert len(losses) > 10
    return losses


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    words = [sys.executable, "-m", "paceline", "run", "--nproc-per-node=2"]
    return _losses(words, tmp_path_factory.mktemp("two"))


def test_one_process(tmp_path: Path, expected: list[float]) -> None:
    # Adam divides by small numbers, so that rounding grows. The last step has fewer samples, so its
    # micro-batches, and the masks of dropout, depend on the number of ranks.
    found = _losses([sys.executable], tmp_path)
    assert found[:-1] == pytest.approx(expected[:-1], rel=1e-3)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_that_is_a_command(name: str, tmp_path: Path, expected: list[float]) -> None:
    if shutil.which(LAUNCHERS[name][0]) is None:
        pytest.skip(f"{name} is not installed (.ci/packages installs it)")
    assert _losses(LAUNCHERS[name], tmp_path) == expected


@pytest.mark.parametrize("name", SRUN)
def test_tasks_of_two_nodes_of_slurm(name: str, tmp_path: Path, expected: list[float]) -> None:
    (tmp_path / "slurm").mkdir()
    with cluster(tmp_path / "slurm", 2) as slurm:
        assert _losses(SRUN[name], tmp_path, **slurm.variables) == expected


def test_two_hosts(tmp_path: Path, expected: list[float]) -> None:
    if why := missing_tool():
        pytest.skip(why)
    with hosts(2) as made:
        words = ["run", "--nnodes=2", f"--host={made.address(0)}", *SCRIPT]
        nodes = [made.start(n, words, tmp_path, OMP_NUM_THREADS="1") for n in range(2)]
        ends = [finish(node) for node in nodes]
    assert [end.code for end in ends] == [0, 0], ends
    assert _written(tmp_path) == expected
