"""The canary: every private name of torch is found in the installed torch, and used through one module."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR

import paceline
from paceline import torch_private

SOURCE = Path(paceline.__file__).parent
OTHERS = sorted(p for p in SOURCE.rglob("*.py") if p.name != "torch_private.py")


@pytest.mark.parametrize("name", torch_private.NAMES, ids=lambda name: name.path)
def test_the_installed_torch_has_it(name: torch_private.PrivateName) -> None:
    if "nccl" in name.path and not torch.distributed.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    if torch.__version__ < name.since:
        pytest.skip(f"torch has it since {name.since}")
    if name.of_objects:
        linear = torch.ones(2, 3, requires_grad=True)
        objects = (
            linear.log_softmax(1).mean(),
            linear.mean() / 2,
            nn.functional.cross_entropy(linear, torch.ones(2).long(), weight=torch.ones(3)),
            nn.functional.mse_loss(linear, torch.ones(2, 3)),
        )
        schedule = ConstantLR(torch.optim.SGD([linear]))
        owners = [*(loss.grad_fn for loss in objects), torchmetrics.MeanMetric()]
        owners.append(ChainedScheduler([schedule]))
        values = [torch_private.attribute(name.path, owner) for owner in owners]
        owner, _, last = name.path.rpartition(".")
        is_used = last in _used_by(torch_private.look_up(owner))
        assert is_used or any(value is not None for value in values)
    else:
        assert torch_private.look_up(name.path) is not None
    assert name.why
    assert name.since
    assert name.without


def _used_by(owner: Any) -> set[str]:
    """The names in the methods of a class and of its bases."""
    members = [m for base in getattr(owner, "__mro__", ()) for m in vars(base).values()]
    return {n for m in members if isinstance(m, FunctionType) for n in m.__code__.co_names}


def test_a_missing_name_is_none_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    missing = torch_private.PrivateName(
        "torch.nn._gone", why="", since="", without="nothing happens"
    )
    torch_private._BY_PATH[missing.path] = missing
    try:
        assert torch_private.find(missing.path) is None
        assert torch_private.find(missing.path) is None
    finally:
        del torch_private._BY_PATH[missing.path]
    assert [r.message for r in caplog.records if "torch.nn._gone" in r.message]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_paceline")) and name != "_"


USED_THROUGH = {name.path.rpartition(".")[2] for name in torch_private.NAMES}


def _private_names(tree: ast.AST) -> Iterator[str]:
    """Imports of private names of torch, and private attributes of what is imported from torch."""
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            paths = {alias.name: alias.asname or "torch" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            paths = {f"{node.module}.{a.name}": a.asname or a.name for a in node.names}
        else:
            continue
        of_torch = {path: name for path, name in paths.items() if path.split(".")[0] == "torch"}
        imported |= set(of_torch.values())
        yield from (path for path in of_torch if "._" in path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            path = ast.unparse(node)
            # torch documents no `_foreach_*`, but it is torch's way to work on many tensors in one call.
            if path.split(".")[0] in imported and "._foreach_" not in path:
                yield path


@pytest.mark.parametrize("path", OTHERS, ids=lambda p: p.relative_to(SOURCE).as_posix())
def test_no_other_module_uses_private_names_of_torch(path: Path) -> None:
    assert list(_private_names(ast.parse(path.read_text()))) == []


# Modules whose classes have a base of torch, and private methods or attributes.
SUBCLASSES = [path for path in OTHERS if re.search(r"^class \w+\(", path.read_text(), re.M)]


@pytest.mark.parametrize("path", SUBCLASSES, ids=lambda p: p.relative_to(SOURCE).as_posix())
def test_a_private_method_of_torch_that_a_subclass_replaces_is_listed(path: Path) -> None:
    module = importlib.import_module(
        ".".join(["paceline", *path.relative_to(SOURCE).with_suffix("").parts])
    )
    for cls in vars(module).values():
        if not isinstance(cls, type) or cls.__module__ != module.__name__:
            continue
        bases = [base for base in cls.__mro__ if base.__module__.split(".")[0] == "torch"]
        of_torch = {name for base in bases for name in vars(base) if _is_private(name)}
        replaced = {name for name, value in vars(cls).items() if inspect.isfunction(value)}
        assert replaced & of_torch <= USED_THROUGH
