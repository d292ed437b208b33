"""Imports go from a room to rooms above it, without cycles; public names say which ranks must call them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import paceline

SOURCE = Path(paceline.__file__).parent

# From the ground up: a file imports from its own room and from the rooms above it in this list.
ORDER = [
    "exit_codes",
    "errors",
    "command_line",
    "log",
    "credentials",
    "store_exchange",
    "torch_private",
    "clock",
    "machine",
    "shm",
    "mpi",
    "job",
    "data",
    "parallel",
    "checkpoint",
    "metrics",
    "training",
    "watch",
    "explain",
    "launch",
    "audit",
    "verify",
    "profile",
    "doctor",
    "report",
    "plan",
    "schedulers",
    "cli",
    "testing",
    "__main__",
]

# Imports inside functions: optional dependencies, and what keeps `paceline --help` free of torch.
MAY_DEFER = {
    "__init__.py": "names are resolved when first used",
    "mpi/world.py": "mpi4py is optional, and its import loads the MPI library",
    "metrics/mlflow.py": "mlflow is optional",
    "metrics/prometheus.py": "prometheus_client is optional",
    "metrics/tensorboard.py": "tensorboard is optional",
    "metrics/wandb.py": "wandb is optional",
    "report/page.py": "vl-convert-python is optional",
    "job/job.py": "DeviceMesh takes 0.1 s, and only jobs with a mesh need it",
    "machine.py": "psutil takes 20 ms, and only messages need it",
    "job/devices.py": "the backend over mpi4py takes 10 ms, and only its jobs need it",
    "metrics/report.py": "rich takes 30 ms, and only a progress bar needs it",
    "metrics/usage.py": "psutil takes 20 ms, and only runs with a report need it",
    "parallel/diloco.py": "FSDP2 takes 0.5 s, and only sharded models need it",
    "parallel/modules.py": "FSDP2 takes 0.5 s, and only sharded models need it",
    "parallel/strategies.py": "FSDP2 takes 0.5 s, and only sharded models need it",
    "training/trainer.py": "FSDP2 takes 0.5 s, and only split models need it",
    "checkpoint/layout.py": "torch's DCP takes 0.6 s, and only those who save need it",
    "checkpoint/store.py": "fsspec takes 0.1 s, and is needed for URLs alone",
    "checkpoint/cloud_errors.py": "fsspec takes 0.1 s, and is needed for URLs alone",
    "checkpoint/export.py": "safetensors is optional",
    "checkpoint/weights.py": "safetensors is optional, and torch's DCP takes 0.6 s",
    "cli/ckpt.py": "`paceline ckpt ls` without torch",
    "cli/doctor.py": "`paceline --help` without torch",
    "cli/main.py": "`paceline --help` without torch",
    "cli/plan.py": "`paceline --help` without torch",
    "cli/profile.py": "`paceline --help` without torch",
    "cli/report.py": "`paceline --help` without torch",
    "cli/top.py": "`paceline --help` without rich",
    "cli/run.py": "`paceline --help` without torch",
    "cli/verify.py": "`paceline --help` without torch",
    "launch/local_ranks.py": "psutil takes 0.1 s, and the ranks are started before",
    "launch/worker.py": "the first code of a rank imports as little as it can",
    "launch/options.py": "torch is needed only to count GPUs",
    "launch/supervisor.py": "the ranks of one host start before the launcher imports torch",
    "job/store_server.py": "the launcher binds the socket of the store before it imports torch",
    "verify/forked_ranks.py": "a rank's first code belongs to the rank alone",
}
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


def _room(name: str) -> str:
    return name.split("/", maxsplit=1)[0].removesuffix(".py")


def _imports(tree: ast.AST) -> set[str]:
    rooms = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            parts = node.module.split(".")
            if parts[0] == "paceline":
                names = [alias.name for alias in node.names]
                rooms |= {parts[1]} if len(parts) > 1 else set(names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "paceline" and len(parts) > 1:
                    rooms.add(parts[1])
    return {room for room in rooms if room in ORDER}


@pytest.mark.parametrize("name", [f for f in FILES if f != "__init__.py"])
def test_imports_run_downward_only(name: str) -> None:
    room = _room(name)
    assert room in ORDER, f"{name} is in no room of the order above"
    tree = ast.parse((SOURCE / name).read_text())
    for other in _imports(tree) - {room}:
        assert ORDER.index(other) < ORDER.index(room), f"{name} imports {other} from above"


def _file_of(module: str) -> str | None:
    path = module.removeprefix("paceline.").replace(".", "/")
    return next((f for f in (f"{path}.py", f"{path}/__init__.py") if f in FILES), None)


def _imported_files(name: str) -> set[str]:
    """The files that a file imports, also inside functions and for type checkers."""
    modules = []
    for node in ast.walk(ast.parse((SOURCE / name).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "paceline":
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            modules += [m if _file_of(m) else str(node.module) for m in inside]
        elif isinstance(node, ast.Import):
            modules += [a.name for a in node.names if a.name.startswith("paceline.")]
    return {file for module in modules if (file := _file_of(module)) is not None}


def test_no_files_import_each_other() -> None:
    # paceline/__init__.py imports a public name when it is first used.
    imports = {name: _imported_files(name) - {name} for name in FILES if name != "__init__.py"}
    while True:
        imported = set().union(*imports.values())
        ends = [
            n for n, others in imports.items() if not others & imports.keys() or n not in imported
        ]
        if not ends:
            break
        for name in ends:
            del imports[name]
    cycles = {name: sorted(others & imports.keys()) for name, others in imports.items()}
    assert not cycles


@pytest.mark.parametrize("name", FILES)
def test_no_import_hides_in_a_function(name: str) -> None:
    if name in MAY_DEFER:
        return
    tree = ast.parse((SOURCE / name).read_text())
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                assert not isinstance(node, ast.Import | ast.ImportFrom), (
                    f"{name}:{node.lineno} imports inside {function.name}"
                )


@pytest.mark.parametrize("name", paceline.__all__)
def test_public_names_say_who_must_call_them(name: str) -> None:
    thing = getattr(paceline, name)
    if isinstance(thing, str) or (isinstance(thing, type) and issubclass(thing, Exception)):
        return
    assert thing.__doc__, f"{name} has no docstring"
    assert "Collective:" in thing.__doc__, f"{name} does not say who must call it"
    for method_name, method in vars(thing).items() if isinstance(thing, type) else []:
        if not method_name.startswith("_") and callable(method):
            said = (method.__doc__ or "") + thing.__doc__
            assert "Collective:" in said, f"{name}.{method_name} does not say who must call it"


def test_public_names_are_sorted_and_resolve() -> None:
    assert paceline.__all__ == sorted(paceline.__all__)
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
