"""The files and names on the page about the architecture exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from test_layers import FILES, ORDER, SOURCE

PAGE = (Path(__file__).parents[2] / "docs" / "inside" / "architecture.md").read_text()
REFERENCES = sorted(set(re.findall(r"`([\w/]+\.py)(?:::(\w+(?:\.\w+)?))?`", PAGE)))


def _names(file: str) -> set[str]:
    names = set()
    for node in ast.parse((SOURCE / file).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
            names |= {f"{node.name}.{n.name}" for n in node.body if isinstance(n, ast.FunctionDef)}
    return names


@pytest.mark.parametrize(("file", "name"), REFERENCES, ids=map("::".join, REFERENCES))
def test_each_file_and_name_exists(file: str, name: str) -> None:
    assert file in FILES
    assert not name or name in _names(file)


def test_the_page_lists_all_rooms_in_order() -> None:
    table = PAGE.partition("## Rooms")[2].partition("## ")[0]
    rooms = [
        room
        for row in re.findall(r"^\| (`.*?`) \|", table, re.M)
        for room in re.findall(r"\w+", row)
    ]
    here = {file.split("/")[0].removesuffix(".py") for file in FILES} - {"__init__"}
    assert rooms == [room for room in ORDER if room in here]
