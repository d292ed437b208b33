"""Run a function of a test on ranks that MPI's launcher starts. As a script, this file is one rank."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

BIN = Path(sys.executable).parent
# The launcher, its options, and which library mpi4py's wheel loads: else the one beside it.
MPI: dict[str, tuple[str, Sequence[str], dict[str, str]]] = {
    "mpich": ("mpiexec.hydra", ["-n"], {}),
    "openmpi": (
        "mpirun.openmpi",
        ["--allow-run-as-root", "--oversubscribe", "-np"],
        {"MPI4PY_LIBMPI": "libmpi.so.40"},
    ),
}


def mpi_command(kind: str, nproc: int) -> tuple[list[str], dict[str, str]]:
    """How to start `nproc` processes, and the variables for them. Skips the test if that is impossible."""
    name, options, variables = MPI[kind]
    if not importlib.util.find_spec("mpi4py"):
        pytest.skip("mpi4py is not installed (pip install mpi4py)")
    path = str(BIN) if kind == "mpich" else None  # the package brings launcher and library
    if (found := shutil.which(name, path=path)) is None:
        pytest.skip(f"{name} is not installed (pip install mpich; the host's package openmpi-bin)")
    return [found, *options, str(nproc)], variables


def run_mpi_ranks(
    kind: str,
    function: Callable[..., Any],
    *args: Any,
    nproc: int,
    folder: Path,
    timeout_s: float = 20.0,
    deadline_s: float = 90.0,
) -> list[Any]:
    """Call `function(job, *args)` on ranks with the backend mpi.

    Returns:
        In rank order the results, or the errors that ranks raised.
    """
    words, variables = mpi_command(kind, nproc)
    (folder / "payload").write_bytes(cloudpickle.dumps((function, args, timeout_s, nproc)))
    try:
        done = subprocess.run(
            [*words, sys.executable, __file__, str(folder), str(deadline_s)],
            env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=deadline_s,
        )
    except subprocess.TimeoutExpired as error:
        ended = sorted(path.name for path in folder.glob("rank-*"))
        told = (error.stderr or b"").decode(errors="replace")
        pytest.fail(f"not ended after {deadline_s} s; results: {ended}\n{told}")
    paths = [folder / f"rank-{rank}" for rank in range(nproc)]
    assert all(path.exists() for path in paths), done.stdout + done.stderr
    return [cloudpickle.loads(path.read_bytes()) for path in paths]


def main(folder: Path, deadline_s: float) -> None:
    """Run as one rank: write the result, and wait for those of the others, since MPI would end them."""
    import paceline

    faulthandler.dump_traceback_later(
        deadline_s - 5
    )  # the test that fails shows where each rank is
    function, args, timeout_s, nproc = cloudpickle.loads((folder / "payload").read_bytes())
    number = None
    try:
        with paceline.join(device="cpu", backend="mpi", timeout_s=timeout_s) as job:
            number = job.rank
            outcome = function(job, *args)
    except Exception as error:
        traceback.print_exc()
        outcome = error
    if number is None:
        raise SystemExit(1)
    scratch = folder / f"scratch-{number}"
    scratch.write_bytes(cloudpickle.dumps(outcome))
    scratch.rename(folder / f"rank-{number}")
    while not all((folder / f"rank-{rank}").exists() for rank in range(nproc)):
        time.sleep(0.01)  # bounded by the deadline of the launcher


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
