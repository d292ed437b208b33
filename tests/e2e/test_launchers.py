"""`join` under each launcher: OpenMPI, MPICH, Slurm, torchrun and none."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import Finished, finish, spawn
from scripts import training_script

BIN = Path(sys.executable).parent
MPI = {
    "openmpi": ("mpirun.openmpi", ["--allow-run-as-root", "--oversubscribe", "-np"]),
    "mpich": ("mpiexec.hydra", ["-n"]),
}
FACTS = """
import os, sys
import torch
import torch.distributed as dist
import paceline
hook = sys.excepthook
for _ in range(2):  # join again after leaving
    with paceline.join(device="cpu", timeout_s=30) as job:
        total = torch.ones(1)
        if job.group is not None:
            dist.all_reduce(total, group=job.group)
        ranks = list(paceline.gather(job, f"{job.rank}{os.environ.get('JOB', '')}"))
assert sys.excepthook is hook
line = f"{job.launcher} {job.rank}/{job.world_size} sum {total.item():g} {' '.join(ranks)}"
os.write(1, (line + chr(10)).encode())
"""
WEIGHTS = training_script(epochs=2, options="reproducible=True")
UNLEFT = """
import torch
import paceline
job = paceline.join(device="cpu", timeout_s=30)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8), process_group=job.group)
model(torch.ones(4, 8)).sum().backward()
"""


def launch(words: list[str], cwd: Path, **more: str) -> subprocess.Popen[str]:
    """Start a launcher in a process group of its own."""
    return spawn(words, cwd, own_group=True, OMP_NUM_THREADS="1", **more)


def script(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def mpi(kind: str, count: int) -> list[str]:
    """How to start `count` ranks with this MPI."""
    name, words = MPI[kind]
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (.ci/packages installs it)")
    return [found, *words, str(count)]


def expected(launcher: str, count: int, job: str = "") -> list[str]:
    everybody = " ".join(f"{rank}{job}" for rank in range(count))
    return [f"{launcher} {rank}/{count} sum {count} {everybody}" for rank in range(count)]


def lines(done: Finished, launcher: str) -> list[str]:
    assert done.code == 0, done.err
    return sorted(line for line in done.out.splitlines() if line.startswith(launcher))


@pytest.mark.parametrize("backend", [pytest.param("shm", marks=pytest.mark.slow), "mpi"])
@pytest.mark.ci
def test_weights_under_mpirun_are_those_of_one_process(tmp_path: Path, backend: str) -> None:
    words = mpi("openmpi", 3)
    if backend == "mpi" and not importlib.util.find_spec("mpi4py"):
        pytest.skip("mpi4py is not installed (pip install mpi4py)")
    more = {"PACELINE_BACKEND": backend, "MPI4PY_LIBMPI": "libmpi.so.40"}
    ranks = finish(launch(words + script(tmp_path, WEIGHTS), tmp_path, **more))
    assert ranks.code == 0, ranks.err
    alone = finish(launch(script(tmp_path, WEIGHTS), tmp_path))
    assert alone.out.startswith("weights ")
    assert [x for x in ranks.out.splitlines() if "weights" in x] == alone.out.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("kind", MPI)
def test_two_mpi_jobs_at_once_behind_shells_do_not_mix(tmp_path: Path, kind: str) -> None:
    # This shell has a command after the rank, so it stays between launcher and rank.
    wrapped = ["bash", "-c", " ".join(script(tmp_path, FACTS)) + "; exit $?"]
    jobs = {name: launch(mpi(kind, 2) + wrapped, tmp_path, JOB=name) for name in "ab"}
    done = {name: finish(process) for name, process in jobs.items()}
    for name in "ab":
        assert lines(done[name], "mpi") == expected("mpi", 2, name)


@pytest.mark.ci
def test_ranks_join_again_at_the_same_address(tmp_path: Path, free_port: int) -> None:
    # Rank 0 closes its store long after the others have left the job.
    late = """
import time, paceline.job.job
close = paceline.job.job.Job._close
def slowly(job):
    time.sleep(job.rank == 0)
    close(job)
paceline.job.job.Job._close = slowly
"""
    words = mpi("openmpi", 2) + script(tmp_path, late + FACTS)
    more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    assert lines(finish(launch(words, tmp_path, **more)), "mpi") == expected("mpi", 2)


@pytest.mark.ci
def test_ranks_of_paceline_run_join_again(tmp_path: Path) -> None:
    # The launcher keeps the store, so that it stays open between two joins.
    script(tmp_path, FACTS)
    words = [sys.executable, "-m", "paceline", "run", "--nproc-per-node=2", "script.py"]
    done = finish(launch(words, tmp_path))
    assert done.code == 0, done.err
    # `paceline run` puts the rank before each line.
    said = sorted(line.partition("] ")[2] for line in done.out.splitlines())
    assert said == expected("torchrun", 2)


@pytest.mark.ci
def test_a_rank_that_ends_before_it_joins_is_named(tmp_path: Path) -> None:
    text = "import os\nif os.environ['PMI_RANK'] == '1': raise SystemExit(0)\n"
    text += "import paceline\npaceline.join(device='cpu', timeout_s=2)"
    done = finish(launch(mpi("mpich", 3) + script(tmp_path, text), tmp_path))
    assert done.code != 0
    assert done.err.count("rank 1 of 3 did not join within 2 s") >= 1


@pytest.mark.ci
def test_an_error_of_one_mpi_rank_ends_all(tmp_path: Path) -> None:
    text = training_script(
        'if job.rank == 1 and step.number == 5: raise ValueError("bad sample 17")'
    )
    words = [*mpi("openmpi", 2), *script(tmp_path, text)]
    done = finish(launch(words, tmp_path))
    assert done.code != 0
    # The launcher may end the other rank before it reports anything.
    assert "ValueError: bad sample 17" in done.err


@pytest.mark.slow
def test_torchrun_ends_with_0_if_no_rank_leaves_the_job(tmp_path: Path) -> None:
    script(tmp_path, UNLEFT)
    words = [str(BIN / "torchrun"), "--nproc-per-node=2", "--standalone", "script.py"]
    done = finish(launch(words, tmp_path))
    assert done.code == 0, done.err
    assert "without an active exception" not in done.err
