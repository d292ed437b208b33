"""Benchmarks import names of Paceline that exist; the documentation shows their results."""

from __future__ import annotations

import ast
import importlib
import runpy
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


def test_figures_in_the_documentation_are_those_of_the_results() -> None:
    """`python benchmarks/figures.py` writes them."""
    figures = runpy.run_path(str(ROOT / "benchmarks/figures.py"))
    shown = set()
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = path.read_text()
        assert figures["fill"](text) == text, path
        shown |= {found[2] for found in figures["BLOCK"].finditer(text)}
    assert shown == set(figures["TABLES"])
