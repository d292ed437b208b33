"""The page of environment variables has every variable that the source names, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import paceline

SOURCE = Path(paceline.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "environment.md"
NAME = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|RANK|LOGLEVEL")
# Words that look like variables.
OTHERS = [
    *("*INT*_T", "C_*_COMPLEX"),  # types of MPI
    *("SC_PAGE_SIZE", "SC_PHYS_PAGES"),  # of os.sysconf
    "TCP_KEEP*",  # options of sockets
    *("LOG_DIR", "NO_PYTHON", "RUN_PATH"),  # options
    *("FOR_ITER", "TORCH_INDEX"),  # an instruction of Python; an argument of a Dockerfile
]


def _named_in_source() -> Iterator[str]:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value
            elif isinstance(node, ast.keyword):  # dict(RANK="0")
                name = node.arg or ""
            else:
                continue
            if NAME.fullmatch(name) and not any(fnmatch(name, other) for other in OTHERS):
                yield name


def test_the_page_and_the_source_name_the_same_variables() -> None:
    cells = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    on_page = {name for cell in cells for name in re.findall(r"`([A-Z0-9_*]+)`", cell)}
    named = set(_named_in_source())
    missing = {n for n in named if not any(fnmatch(n, pattern) for pattern in on_page)}
    assert not missing, "add them to docs/reference/environment.md"
    text = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    assert not {n for n in on_page if n.rstrip("*") not in text and n != "TMPDIR"}
