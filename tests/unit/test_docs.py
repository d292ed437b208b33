"""Links and pages that source code names exist; the site has all pages and all public names."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
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


def test_every_page_is_in_the_navigation_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"[\w/-]+\.md$", nav, flags=re.M)
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    maintainers = {page for page in pages if page.startswith("inside/")}
    assert sorted(listed) == sorted(pages - maintainers)


def test_pages_of_the_site_link_to_files_of_the_site() -> None:
    """`zensical build --strict` checks links to pages, but not to other files."""
    outside = {}
    for page in DOCS.rglob("*.md"):
        links = re.findall(
            r"\]\(([^)\s#]+)", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        )
        local = [link for link in links if not re.match(r"\w+:", link)]
        wrong = [link for link in local if not (page.parent / link).resolve().is_relative_to(DOCS)]
        if wrong:
            outside[page.name] = wrong
    assert outside == {}


def test_every_public_name_is_in_the_reference_once() -> None:
    pages = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    described = re.findall(r"^::: paceline\.(\w+)$", pages, flags=re.M)
    errors = re.findall(r"^\| `(\w+)` \|", (DOCS / "reference/errors.md").read_text(), flags=re.M)
    assert sorted([*described, *errors, "__version__"]) == paceline.__all__


def test_figures_in_the_documentation_are_those_of_the_results() -> None:
    """`python benchmarks/figures.py` writes them."""
    figures = runpy.run_path(str(ROOT / "benchmarks/figures.py"))
    shown = set()
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = path.read_text()
        assert figures["fill"](text) == text, path
        shown |= {found[2] for found in figures["BLOCK"].finditer(text)}
    assert shown == set(figures["TABLES"])
