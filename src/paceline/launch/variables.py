"""Applies the environment variables that a script sets, in a rank and in the processes that it spawns.

Under `paceline run` torch is imported before the script begins, so torch has read some of them already.
worker.py loads this file without importing the package `paceline`, so it may import only the standard
library. Spawned processes import it by name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from multiprocessing.process import BaseProcess
from typing import Any

# Read when torch is imported, which is before the script begins.
_READ_AT_IMPORT = frozenset(
    {"PYTORCH_JIT", "TORCH_SHOW_CPP_STACKTRACES"}
    | {"TORCH_LOGS", "TORCH_CPP_LOG_LEVEL", "MKL_DYNAMIC", "KMP_AFFINITY", "KMP_BLOCKTIME"}
    | {"GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES", "OMP_WAIT_POLICY", "OMP_DYNAMIC"}
)
# Read at the first use of a GPU, but for the choice of the allocator.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def watch_rank(send: Callable[[dict[str, Any]], Any]) -> None:
    """Apply the variables that the script of this rank sets; `send` sends an event to the launcher."""
    _watch(functools.partial(_apply, send))
    _watch_spawned_processes()


def _watch(apply: Callable[[str, str], None]) -> None:
    """Call `apply(name, value)` for each variable that the script sets.

    Wraps os.putenv, which os.environ calls; an audit hook would slow down every id() of the program.
    """
    putenv = os.putenv

    def watched(name: Any, value: Any) -> None:
        putenv(name, value)
        apply(os.fsdecode(name), os.fsdecode(value))

    os.putenv = watched


def _apply(send: Callable[[dict[str, Any]], Any], name: str, value: str) -> None:
    """Apply a variable that a script sets before its own `import torch`: torch is imported already."""
    if name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") and value.isdigit() and int(value) > 0:
        os.environ.pop("PACELINE_THREADS", None)
        sys.modules["torch"].set_num_threads(int(value))
    elif name == "TORCH_DISTRIBUTED_DEBUG":
        sys.modules["torch.distributed"].set_debug_level_from_env()
    elif os.environ.get(name) == value:
        return  # it was set before torch was imported
    elif name == "MASTER_PORT":
        _leave_agent_store(name, value)
    elif name.startswith("TORCH") and "torch._dynamo" not in sys.modules:
        send({"event": "variable"})
    if name in _READ_AT_IMPORT or (name in _ALLOCATOR and "backend:" in value):
        print(
            f"paceline: {name} has no effect here: torch reads it when it is imported, which under "
            "`paceline run` is before the script. Set it outside the script, or set PACELINE_PRELOAD=0",
            file=sys.stderr,
        )


def _leave_agent_store(name: str, value: str) -> None:
    """If a script sets MASTER_PORT, its ranks do not meet at the store of the launcher."""
    # With this variable, rank 0 would connect to that port, where the launcher has opened no store.
    if name != "MASTER_PORT" or os.environ.get(name) == value:
        return
    if os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", ""):
        print(
            f"paceline: the script sets MASTER_PORT={value}, so its ranks meet there and not at the store of "
            "the launcher (TORCHELASTIC_USE_AGENT_STORE is removed)",
            file=sys.stderr,
        )


def _watch_spawned_processes() -> None:
    """Watch for a port that spawned processes set. Forked ones inherit what watches this process."""
    start = BaseProcess.start

    @functools.wraps(start)
    def start_watched(process: Any) -> None:
        is_default = isinstance(process, multiprocessing.Process)
        method = multiprocessing.get_start_method() if is_default else ""
        if method != "fork" and not isinstance(process, ForkProcess) and _is_importable():
            process.run = functools.partial(run_spawned, process.run)
        start(process)

    kind: Any = BaseProcess
    kind.start = start_watched


def _is_importable() -> bool:
    """Whether processes that the script spawns import this paceline, not a file of the script's folder."""
    with contextlib.suppress(ImportError, ValueError):
        found = importlib.util.find_spec("paceline")
        package = os.path.dirname(os.path.dirname(__file__))
        return found is not None and found.origin == os.path.join(package, "__init__.py")
    return False


def run_spawned(run: Callable[[], Any]) -> Any:
    """Call `run` of a spawned process, which may set a port too."""
    _watch(_leave_agent_store)
    return run()
