"""The launcher where the installed torch has another name for a private name that Paceline uses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline import torch_private

NUMA = "_maybe_wrap_command_args_with_numa_binding"
AGENT = {n.path: n for n in torch_private.NAMES if n.path.startswith(torch_private.AGENT)}
NODES = {n.path: n for n in torch_private.NAMES if n.path.startswith(torch_private.RENDEZVOUS)}
WITHOUT_AGENT = "torch's own agent runs the ranks"
SEVERAL = [
    *("--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
    "--rdzv-conf=is_host=1,last_call_timeout=1",
]
# Renames in the source of torch's launcher, so that torch calls its own methods by their new names.
RUN = """
import importlib.machinery, re, sys
names = sys.argv.pop(1).split(",")

class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        text = re.sub(rf"\\b({'|'.join(names)})\\b", r"\\1_renamed", self.get_source(fullname))
        return compile(text, self.path, "exec", dont_inherit=True)

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if not name.startswith(("torch.distributed.elastic.", "torch.numa.")):
            return None
        spec = super().find_spec(name, path, target)
        if spec is None:
            return None
        spec.loader = Loader(name, spec.origin)
        return spec

sys.meta_path.insert(0, Finder)
from paceline.launch import run
sys.exit(run(sys.argv[1:]))
"""


def _run(folder: Path, *words: str, without: list[str]) -> subprocess.CompletedProcess[str]:
    names = ",".join(sorted({path.rpartition(".")[2] for path in without}))
    return subprocess.run(
        [sys.executable, "-c", RUN, names, *words, "train.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )


def _trained_without(name: str, folder: Path) -> str:
    """Train with one rank that fails once; what the launcher printed."""
    (folder / "train.py").write_text(
        "import os, sys\n"
        "assert os.environ['RANK'] == os.environ['LOCAL_RANK'] == '0'\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': sys.exit(5)\n"
        "print('trained')\n"
    )
    done = _run(folder, "--max-restarts=1", without=[name])
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    return done.stderr


@pytest.mark.ci
@pytest.mark.parametrize(
    "path", [f"{torch_private.AGENT}.{name}" for name in ("_rendezvous", "_set_local_rank_env")]
)
def test_one_node_trains_without_a_private_name_of_the_agent(path: str, tmp_path: Path) -> None:
    said = _trained_without(path, tmp_path)
    assert f"has no {path}: {AGENT[path].without}" in said
    explained = "restart 1 of 1" in said
    assert explained == (not AGENT[path].without.startswith(WITHOUT_AGENT))


@pytest.mark.slow
@pytest.mark.parametrize("path", AGENT)
def test_one_node_trains_without_any_private_name_of_the_agent(path: str, tmp_path: Path) -> None:
    said = _trained_without(path, tmp_path)
    # `_exit_barrier` and `_store` are not needed on one node with a port that the kernel chooses.
    silent = path.endswith(("._exit_barrier", "._store"))
    assert (f"has no {path}: {AGENT[path].without}" in said) == (not silent)


@pytest.mark.slow
@pytest.mark.parametrize("path", NODES)
def test_one_node_needs_no_private_name_of_the_rendezvous(path: str, tmp_path: Path) -> None:
    assert " has no torch." not in _trained_without(path, tmp_path)


@pytest.mark.ci
def test_the_agent_of_torch_gives_the_exit_code_of_the_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(7)")
    words = ["--nproc-per-node=2", "--on-hang=end", "--hang-after=9", "--shutdown-timeout=9"]
    done = _run(tmp_path, *words, without=[f"{torch_private.AGENT}._shutdown"])
    assert done.returncode == 7, done.stderr
    for name in ("--on-hang=end", "--shutdown-timeout"):
        assert f"paceline: {name} has no effect: {WITHOUT_AGENT}\n" in done.stderr


@pytest.mark.ci
def test_the_launcher_without_private_names_of_the_rendezvous_and_of_numa(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    without = [*NODES, NUMA]
    done = _run(tmp_path, without=without)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert "has no torch." not in done.stderr
    refused = _run(tmp_path, "--numa-binding=node", without=without)
    assert refused.returncode == 2
    assert "--numa-binding cannot be used with this torch" in refused.stderr


@pytest.mark.slow
def test_several_nodes_use_the_rendezvous_of_torch_without_private_names(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    done = _run(tmp_path, *SEVERAL, without=list(NODES))
    without = "jobs on several nodes use torch's own rendezvous"
    needed = [path for path, name in NODES.items() if name.without.startswith(without)]
    assert len(needed) == len(NODES) - 1  # without `_delay`, they only start later
    assert any(f"has no {path}: {without}" in done.stderr for path in needed)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
