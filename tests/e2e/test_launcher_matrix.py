"""Every example under every launcher: two ranks give the losses of `paceline run`, bit for bit.

Those of `paceline run` are compared with one process here, and by `paceline verify` in
test_verify_paceline.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from hosts import hosts, missing_tool
from launching import Finished, finish, spawn
from slurm_cluster import cluster

pytestmark = pytest.mark.timeout(900)

FOLDER = Path(__file__).resolve().parents[2] / "examples"
DEADLINE_S = 300.0
# The examples that train on the ranks of a job, each with the relative difference that is allowed between the
# losses of one process and of two ranks. Adam divides by roots of squared gradients, so that rounding grows.
EXAMPLES = {
    "after.py": 1e-5,
    "char_lm.py": 0.02,  # bf16 rounds each number by up to 0.004
    # The micro-batches, and with them the masks of dropout, depend on the number of ranks. `paceline verify`
    # turns dropout off.
    "digits.py": None,
    "finetune.py": None,
    "gpt_3d.py": 1e-3,
    "own_loop.py": 1e-3,
    "port.py": 1e-3,
}
# The examples that most launchers cannot run by nature, why, and the test that runs them.
OTHERS = {
    "before.py": "it is for one process, without Paceline: test_examples.py",
    "plain_torchrun.py": "it reads the variables of torchrun: test_the_script_for_torchrun",
    "parameter_server.py": "its workers are asynchronous, and need a server: test_examples.py",
    "notebook.ipynb": "its kernel starts the ranks, and compares 1 with 2: test_notebooks.py",
}
RAY = """
import json, os, runpy, sys
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

def train(config):
    os.chdir(config["folder"])
    sys.argv = config["argv"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")

ray.init(num_cpus=2, include_dashboard=False)
folder = os.getcwd()
for argv in json.loads(sys.argv[1]):
    TorchTrainer(
        train,
        train_loop_config={"argv": argv, "folder": folder},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=folder + "/ray"),
    ).fit()
ray.shutdown()
"""
KERNEL = """
import json, sys
import nbclient, nbformat

runs = ["%run " + " ".join(argv) for argv in json.loads(sys.argv[1])]
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(run) for run in runs])
nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
"""

Words = Sequence[str]
Run = Callable[[Sequence[Words]], Sequence[Finished]]  # of scripts with their arguments
Launcher = Callable[[Path], AbstractContextManager[Run]]


def _finish(words: Words, cwd: Path, **more: str) -> Finished:
    # The number of threads decides how sums round.
    return finish(spawn(words, cwd, own_group=True, OMP_NUM_THREADS="1", **more), DEADLINE_S)


def _command(*words: str) -> Launcher:
    """A launcher that is a command; the script and its arguments follow."""

    @contextlib.contextmanager
    def launcher(cwd: Path) -> Iterator[Run]:
        if shutil.which(words[0]) is None:
            pytest.skip(f"{words[0]} is not installed (.ci/packages installs it)")
        yield lambda scripts: [_finish([*words, *script], cwd) for script in scripts]

    return launcher


def _srun(*words: str) -> Launcher:
    """Tasks of two nodes of a Slurm cluster."""

    @contextlib.contextmanager
    def launcher(cwd: Path) -> Iterator[Run]:
        (cwd / "slurm").mkdir()
        with cluster(cwd / "slurm", 2) as slurm:
            srun = ["srun", "-N2", *words]
            yield lambda scripts: [
                _finish([*srun, *script], cwd, **slurm.variables) for script in scripts
            ]

    return launcher


def _program(text: str, module: str, install: str) -> Launcher:
    """A launcher that is a program in Python; its argument has all scripts with their arguments."""

    @contextlib.contextmanager
    def launcher(cwd: Path) -> Iterator[Run]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install {install}")
        path = cwd / "launcher.py"
        path.write_text(text)
        words = [sys.executable, str(path)]
        yield lambda scripts: [
            _finish([*words, json.dumps(scripts)], cwd, RAY_TRAIN_V2_ENABLED="1")
        ]

    return launcher


@contextlib.contextmanager
def _two_hosts(cwd: Path) -> Iterator[Run]:
    if why := missing_tool():
        pytest.skip(why)
    with hosts(2) as made:

        def run(scripts: Sequence[Words]) -> list[Finished]:
            ends = []
            for script in scripts:
                words = ["run", "--nnodes=2", f"--host={made.address(0)}", *script]
                nodes = [made.start(n, words, cwd, OMP_NUM_THREADS="1") for n in range(2)]
                ends += [finish(node, DEADLINE_S) for node in nodes]
            return ends

        yield run


ONE_PROCESS = _command(sys.executable)
PACELINE_RUN = _command(sys.executable, "-m", "paceline", "run", "--nproc-per-node=2")
TORCHRUN = _command(
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"
)
OPENMPI = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2")
TWO_RANKS = {
    "torchrun": TORCHRUN,
    "OpenMPI": _command(*OPENMPI, sys.executable),
    "MPICH": _command("mpiexec.hydra", "-n", "2", sys.executable),
    "srun with ranks": _srun("-n2", sys.executable),
    "srun with launchers": _srun("-n2", sys.executable, "-m", "paceline", "run"),
    "two hosts": _two_hosts,
    "Ray": _program(RAY, "ray", "'ray[train]'"),
}
# A script that a cell runs is one process.
NOTEBOOK = _program(KERNEL, "nbclient", "nbclient ipykernel")


def _losses(launcher: Launcher, cwd: Path) -> dict[str, list[float]]:
    """The losses of all steps of each example under this launcher."""
    found = {}
    with launcher(cwd) as run:
        for end in run([_script(name, cwd) for name in EXAMPLES]):
            assert end.code == 0, end.out + end.err
    for name in EXAMPLES:
        lines = (cwd / "runs" / Path(name).stem / "metrics.jsonl").read_text().splitlines()
        found[name] = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
        assert len(found[name]) > 10, name
    return found


def _script(name: str, cwd: Path) -> list[str]:
    """The script and its arguments: a short training that writes to the folder `runs`."""
    script = FOLDER / name
    if name == "after.py":  # it has no arguments; its five epochs take seconds
        return [str(script)]
    if name != "port.py":
        return [str(script), "--epochs=1", f"--folder=runs/{script.stem}"]
    text = script.read_text()  # it has no arguments
    assert "epochs=200" in text
    (cwd / name).write_text(text.replace("epochs=200", "epochs=1"))
    return [str(cwd / name)]


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    return _losses(ONE_PROCESS, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    return _losses(PACELINE_RUN, tmp_path_factory.mktemp("two"))


@pytest.mark.slow
def test_two_ranks_are_one_process(
    of_one: dict[str, list[float]], of_two: dict[str, list[float]]
) -> None:
    for name, rtol in EXAMPLES.items():
        assert len(of_two[name]) == len(of_one[name]), name
        if rtol is not None:
            # The last step has fewer samples: its micro-batches, and so its masks of dropout, differ.
            assert of_two[name][:-1] == pytest.approx(of_one[name][:-1], rel=rtol), name


@pytest.mark.slow
@pytest.mark.parametrize("launcher", TWO_RANKS)
def test_two_ranks_of_each_launcher(
    launcher: str, tmp_path: Path, of_two: dict[str, list[float]]
) -> None:
    assert _losses(TWO_RANKS[launcher], tmp_path) == of_two


@pytest.mark.slow
def test_a_script_that_a_notebook_runs(tmp_path: Path, of_one: dict[str, list[float]]) -> None:
    assert _losses(NOTEBOOK, tmp_path) == of_one


@pytest.mark.slow
def test_the_script_for_torchrun(tmp_path: Path) -> None:
    said = {}
    for name, launcher in (
        ("torchrun", TORCHRUN),
        ("paceline run", PACELINE_RUN),
        ("two hosts", _two_hosts),
    ):
        with launcher(tmp_path) as run:
            ends = run([[str(FOLDER / "plain_torchrun.py")]])
        assert all(end.code == 0 for end in ends), ends
        (said[name],) = (
            line.partition("accuracy ")[2]
            for end in ends
            for line in end.out.splitlines()
            if "accuracy " in line
        )
    assert len(set(said.values())) == 1, said
