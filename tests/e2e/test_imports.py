"""What importing costs in modules, not in seconds: nothing heavy that the user did not ask for."""

from __future__ import annotations

import subprocess
import sys

import pytest


def _loaded(code: str) -> set[str]:
    show = f"import sys; {code}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_paceline_imports_nothing_else() -> None:
    new = _loaded("import paceline") - _loaded("import typing")
    assert {name for name in new if not name.startswith("paceline")} <= {"__future__"}


@pytest.mark.ci
def test_a_training_brings_no_module_that_is_slow_to_import() -> None:
    base = _loaded("import torch, torch.distributed")
    names = "join, Batches, Training, Checkpoints, ddp, evaluate"
    new = _loaded(f"import torch, torch.distributed; from paceline import {names}") - base
    heavy = (
        "torch.distributed.checkpoint",
        "torch.distributed.tensor",
        "torch._dynamo",
        "torch._inductor",
        "rich",
        "sympy",
        "statistics",
    )
    assert not [name for name in new if name.startswith(heavy)]


def test_help_does_not_import_torch() -> None:
    code = (
        "import contextlib, io, sys; sys.argv = ['paceline', '--help']\n"
        "from paceline.cli.main import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()): main()\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in done.stdout.split()


def test_the_launcher_starts_ranks_of_one_host_without_torch() -> None:
    assert "torch" not in _loaded("import paceline.launch")
