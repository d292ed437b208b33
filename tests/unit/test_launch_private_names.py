"""The launcher where the installed torch has none of the private names that it can do without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline import torch_private

NUMA = "torch.numa.binding._maybe_wrap_command_args_with_numa_binding"
NAMES = [n.path for n in torch_private.NAMES if n.path.startswith("torch.distributed.elastic.")]
SEVERAL = [
    *("--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
    "--rdzv-conf=is_host=1,last_call_timeout=1",
]


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    code = f"""
import sys
from paceline import torch_private
missing, look_up = {[*NAMES, NUMA]}, torch_private.look_up
torch_private.look_up = lambda path: None if path in missing else look_up(path)
from paceline.launch import run
sys.exit(run(sys.argv[1:]))
"""
    return subprocess.run(
        [sys.executable, "-c", code, *words, "train.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.ci
def test_the_launcher_without_private_names_of_torch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    done = _run(tmp_path)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert "has no torch." not in done.stderr
    refused = _run(tmp_path, "--numa-binding=node")
    assert refused.returncode == 2
    assert "--numa-binding cannot be used with this torch" in refused.stderr


@pytest.mark.slow
def test_several_nodes_use_the_rendezvous_of_torch_without_private_names(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    done = _run(tmp_path, *SEVERAL)
    without = "jobs on several nodes use torch's own rendezvous"
    needed = [n.path for n in torch_private.NAMES if n.without.startswith(without)]
    assert len(needed) == 4
    for name in needed:
        assert f"has no {name}: {without}" in done.stderr
