"""The launcher: `paceline run`, a front to `torch.distributed.run` (torchrun).

`run(argv)` is its entry: it starts the interpreters of the ranks, imports torch while they do, and launches.
worker.py and control_channel.py run in the ranks. prescan.py, local_ranks.py and output.py need no torch.
session.py, options.py, agent.py, rendezvous.py and nodes.py are fronts to torch's launcher.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from paceline.errors import ConfigError
from paceline.launch.local_ranks import LocalRanks, environment_of_ranks
from paceline.launch.output import Consoles
from paceline.launch.prescan import ScriptError, early_count
from paceline.machine import usable_cores

__all__ = ["run"]

USAGE_ERROR = 2
_CPP_LOG_LEVEL = "FATAL"


def run(argv: Sequence[str]) -> int:
    """Run a script on several processes, with the arguments of `paceline run`; returns the exit code.

    The exit code is 0 if all ranks ended well; that of the rank that failed first; 128 + the signal that
    killed it, or that the launcher got; 2 for wrong input. Output goes to this process's standard output
    and error. Call it from the main thread, which receives signals.

    Collective: one process of each node.
    """
    local_ranks: LocalRanks | None = None
    try:
        local_ranks = LocalRanks(Consoles.of_this_process())
        if (count := early_count(argv, os.environ)) is not None:
            local_ranks.start(count, environment_of_ranks(_early_threads(count)))
        return _launch(argv, local_ranks)
    except ConfigError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return USAGE_ERROR
    except ScriptError as error:
        print(error, end="", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # before the scripts had begun
    finally:
        if local_ranks is not None:
            local_ranks.close()


def _early_threads(count: int) -> str | None:
    if "OMP_NUM_THREADS" in os.environ and os.environ.get("PACELINE_THREADS") != "auto":
        return None
    return str(max(1, usable_cores() // count))


def _launch(argv: Sequence[str], local_ranks: LocalRanks) -> int:
    # The collector only slows the import down. At its import torch also reads how much its native code may
    # log: for a store whose other end has left, that would be twenty lines of addresses in the launcher.
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
    return launch(argv, local_ranks)
