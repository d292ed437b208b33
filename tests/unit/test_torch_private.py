"""The canary: every private name of torch is found in the installed torch, and used through one module."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
import torchmetrics
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR

import paceline
from paceline import torch_private

SOURCE = Path(paceline.__file__).parent
OTHERS = sorted(p for p in SOURCE.rglob("*.py") if p.name != "torch_private.py")
PRIVATE_PATH = re.compile(r"torch(\.\w+)*\._[A-Za-z]\w*(\.\w+)*")


@pytest.mark.parametrize("name", torch_private.NAMES, ids=lambda name: name.path)
def test_the_installed_torch_has_it(name: torch_private.PrivateName) -> None:
    if "nccl" in name.path and not torch.distributed.is_nccl_available():
        pytest.skip("this torch has no NCCL")
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
        assert torch_private.has(name.path) or any(value is not None for value in values)
    else:
        assert torch_private.look_up(name.path) is not None
    assert name.why
    assert name.since
    assert name.without


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


def _attribute(node: ast.AST) -> str:
    """The name of an attribute that is read or set, also by `getattr` and `setattr`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
        name = node.args[1]
        return str(name.value) if isinstance(name, ast.Constant) else ""
    return ""


def _defined(tree: ast.AST) -> set[str]:
    """Private names that a module defines, also as attributes of `self`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return {name for name in found if _is_private(name)}


USED_THROUGH = {name.path.rpartition(".")[2] for name in torch_private.NAMES}
OWN = {name for path in OTHERS for name in _defined(ast.parse(path.read_text()))}
STDLIB = {
    "_exit",
    "_current_exceptions",
    "_current_frames",
    "_getframe",
    "_fields",
    "_run_module_as_main",
}
# Attributes of a subclass of argparse's parser. A fork runs the functions of atexit itself.
EXEMPT = {"command_line.py": "self._", "forked_ranks.py": ("atexit._", "threading._")}


def _private(tree: ast.AST) -> list[str]:
    """Imports of private names of torch, and private attributes of what torch's modules export."""
    found, roots = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    roots.add((alias.asname or alias.name).split(".")[0])
                    if "._" in alias.name:
                        found.append(alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                roots.add(alias.asname or alias.name)
                path = f"{node.module}.{alias.name}"
                if "._" in path:
                    found.append(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr[1:2] != "_":
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in roots:
                found.append(f"{ast.unparse(node)}")
    defined = _defined(tree)
    for node in ast.walk(tree):
        name = _attribute(node)
        if not _is_private(name):
            continue
        owner = node.value if isinstance(node, ast.Attribute) else node.args[0]  # type: ignore[attr-defined]
        of_torch = name in USED_THROUGH and name not in defined
        overridden = name in USED_THROUGH and ast.unparse(owner) == "super()"
        if of_torch or overridden or name not in OWN | STDLIB:
            found.append(f"{ast.unparse(owner)}.{name}")
    # As a string, for `find` or another look-up.
    known = {name.path for name in torch_private.NAMES}
    strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)} - known
    found += [s for s in strings if isinstance(s, str) and PRIVATE_PATH.fullmatch(s)]
    # torch documents neither, but they are torch's way to work on many tensors in one call.
    return [name for name in found if "._foreach_" not in name]


@pytest.mark.parametrize("path", OTHERS, ids=lambda p: p.relative_to(SOURCE).as_posix())
def test_no_other_module_uses_private_names_of_torch(path: Path) -> None:
    found = _private(ast.parse(path.read_text()))
    assert [name for name in found if not name.startswith(EXEMPT.get(path.name, ":"))] == []


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
