"""The launcher: `paceline run`, a front to `torch.distributed.run` (torchrun).

`run(argv)` is the whole of it for a program: it starts the ranks' interpreters first, imports torch
while they do, then launches. Ranks live in worker.py; the half of the launcher that needs no torch is
early.py, crew.py, rank.py, output.py; torch's agent and rendezvous are fronted by session.py,
options.py, agent.py, rendezvous.py; verdict.py and report.py are pure.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from paceline.errors import ConfigError
from paceline.launch.local_ranks import Crew, environment_of_ranks
from paceline.launch.output import Consoles
from paceline.launch.prescan import Early, ScriptError, check_script, scan
from paceline.machine import usable_cores

__all__ = ["run"]

USAGE_ERROR = 2
_CPP_LOG_LEVEL = "FATAL"


def run(argv: Sequence[str]) -> int:
    """Run a script on several processes, as `paceline run` with these arguments; the exit code.

    0 when all ranks ended well; the exit code of the rank that failed first, 128 + the signal that
    killed it, or 128 + the signal that the launcher got; 2 for wrong input. Output goes to this
    process's standard output and error. To be called from the main thread, for signals.

    Collective: one process of each node.
    """
    crew: Crew | None = None
    try:
        early = scan(argv, os.environ)
        if early is not None:
            check_script(early.script, module=early.module)
        crew = Crew(Consoles.of_this_process())
        if early is not None:
            _start_early(crew, early)
        return _launch(argv, crew, early)
    except ConfigError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return USAGE_ERROR
    except ScriptError as error:
        print(error, end="", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # before the ranks had begun
    finally:
        if crew is not None:
            crew.close()


def _launch(argv: Sequence[str], crew: Crew, early: Early | None) -> int:
    # The ranks import torch at this moment too; that is what the early start is for. The collector
    # would only slow it down. At its import torch also reads how much its native code may say: a store
    # whose other end has left is worth twenty lines of addresses to it, in the launcher.
    collects = gc.isenabled()
    gc.disable()
    level = os.environ.setdefault("TORCH_CPP_LOG_LEVEL", _CPP_LOG_LEVEL)
    try:
        from paceline.launch.session import launch
    finally:
        if level is _CPP_LOG_LEVEL:
            del os.environ["TORCH_CPP_LOG_LEVEL"]
        if collects:
            gc.enable()
    return launch(argv, crew, early)


def _start_early(crew: Crew, early: Early) -> None:
    threads = None
    if "OMP_NUM_THREADS" not in os.environ or os.environ.get("PACELINE_THREADS") == "auto":
        threads = str(max(1, usable_cores() // early.nproc))
    crew.start(early.nproc, environment_of_ranks(threads))
