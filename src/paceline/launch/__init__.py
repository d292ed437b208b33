"""The launcher: `paceline run`, a front to `torch.distributed.run` (torchrun).

- options.py: the command line; prescan.py: whether there is a script.
- session.py: one run; agent.py: rounds of ranks; rendezvous.py, and for several nodes nodes.py, endpoint.py,
  node_exchange.py and node_facts.py.
- local_ranks.py starts and ends the ranks; output.py passes on what they print; guard.py is a process that
  ends the ranks if the launcher is killed.
- signals.py, hang_watch.py, messages.py and failure_report.py.
- worker.py is the first code of a rank.
- spawning.py starts ranks from a notebook, a debugger or a test, without `paceline run`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from paceline.errors import ConfigError, LaunchFailed
from paceline.exit_codes import ExitCode
from paceline.launch.local_ranks import LocalRanks
from paceline.launch.output import Consoles
from paceline.launch.prescan import ScriptError

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """Run a script on several processes, with the arguments of `paceline run`; returns the exit code.

    The exit code is 0 if all ranks ended well; that of the rank that failed first; 128 + the signal that
    killed it, or that the launcher got; 2 for wrong input. Output goes to this process's standard output
    and error. Call it from the main thread, which receives signals.

    Collective: one process of each node.
    """
    local_ranks: LocalRanks | None = None
    if os.getpid() == 1:
        # In a container. The kernel drops signals to process 1 that have no handler; session.py sets its own
        # ones when torch is imported.
        signal.signal(signal.SIGTERM, _exit)
    try:
        local_ranks = LocalRanks(Consoles.of_this_process())
        return _launch(argv, local_ranks)
    except ConfigError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return ExitCode.USAGE
    except LaunchFailed as error:
        print(f"paceline: {error}", file=sys.stderr)
        return ExitCode.FAILED
    except ScriptError as error:
        print(error, end="", file=sys.stderr)
        return ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED  # the scripts had not begun yet
    finally:
        if local_ranks is not None:
            local_ranks.close()


_received: list[int] = []  # signals that came while torch was imported


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    # In a callback of the import itself, Python prints this error and goes on; so `_launch` looks again.
    _received.append(number)
    raise SystemExit(128 + number)


def _launch(argv: Sequence[str], local_ranks: LocalRanks) -> int:
    # The garbage collector only slows this import down.
    collects_garbage = gc.isenabled()
    gc.disable()
    # torch reads this when it is imported. By default, it would make the launcher print twenty lines of
    # addresses if the process that serves a store has ended.
    user_has_set_level = "TORCH_CPP_LOG_LEVEL" in os.environ
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        from paceline.launch.session import launch
    finally:
        if not user_has_set_level:
            del os.environ["TORCH_CPP_LOG_LEVEL"]
        if collects_garbage:
            gc.enable()
    if _received:
        raise SystemExit(128 + _received[0])
    return launch(argv, local_ranks)
