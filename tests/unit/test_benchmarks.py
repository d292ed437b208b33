"""Each benchmark parses, imports names of Paceline that exist, and is run by make."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "benchmarks").glob("*.py"))
IMPORTED_OR_STARTED = {"tables", "workloads", "survivor"}  # by other benchmarks


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_imported_names_of_paceline_exist(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "paceline":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "paceline":
                    importlib.import_module(alias.name)


def test_make_runs_each_benchmark() -> None:
    makefile = (ROOT / "Makefile").read_text()
    names = {path.stem for path in FILES} - IMPORTED_OR_STARTED
    assert {name for name in names if f"benchmarks/{name}.py" not in makefile} == set()
    for line in makefile.splitlines():
        if "benchmarks/" in line and line.startswith("\t"):
            assert line.split("benchmarks/")[1].split(".py")[0] in names, line
