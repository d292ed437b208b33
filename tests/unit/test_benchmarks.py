"""Each benchmark parses, imports names of Paceline that exist, and is run by make."""

from __future__ import annotations

import ast
import importlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "benchmarks").glob("*.py"))


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


@pytest.mark.ci
def test_dp_vs_ddp_says_why_it_skips() -> None:
    script = ROOT / "benchmarks" / "dp_vs_ddp.py"
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, script], env=hidden, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "skipped: DataParallel needs at least 2 CUDA devices, this machine has 0\n"
    )


def test_figures_in_the_documentation_are_those_of_the_results() -> None:
    """`python benchmarks/figures.py` writes them."""
    figures = runpy.run_path(str(ROOT / "benchmarks/figures.py"))
    shown = set()
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = path.read_text()
        assert figures["fill"](text) == text, path
        shown |= {found[2] for found in figures["BLOCK"].finditer(text)}
    assert shown == set(figures["TABLES"])


def test_claims_are_those_of_the_newest_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python benchmarks/claims.py` writes them."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    claims = importlib.import_module("claims")
    folder = ROOT / "benchmarks/results"
    shown = json.loads((folder / "claims.json").read_text())["rows"]
    for claim, row in zip(claims.CLAIMS, shown, strict=True):
        path = folder / f"{claim.benchmark}.json"
        report = json.loads(path.read_text()) if path.exists() else {"rows": None, "about": {}}
        assert claims.row_of(claim, report["rows"], report["about"]) == row
