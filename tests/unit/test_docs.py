"""Links of the documentation, and the pages that source code names, exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SOURCES = sorted(
    path
    for folder in ("src", "tests", "examples", "benchmarks")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".toml")
)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_linked_files_exist(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    links = re.findall(r"\]\(([^)\s]+)\)", prose)
    files = {link.partition("#")[0] for link in links if not re.match(r"\w+:", link)} - {""}
    assert {file for file in files if not (page.parent / file).exists()} == set()


def test_pages_that_source_code_names_exist() -> None:
    named = {page for path in SOURCES for page in re.findall(r"docs/[\w/-]+\.md", path.read_text())}
    assert len(named) > 5
    assert {page for page in named if not (ROOT / page).exists()} == set()
