"""The ranks of one run, forked from this process, which has imported torch once for all runs of the script.

Under `paceline run` the launcher and each rank import torch, which takes longer than a small script. A forked
rank executes `launch/worker.py` too, so scripts run in the same way. This process uses one thread and no GPU,
because neither OpenMP threads nor CUDA survive a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch

from paceline.exit_codes import ExitCode
from paceline.job.store_server import LOOPBACK, listen, store_on
from paceline.launch.local_ranks import WORKER, choose_threads, environment_of_ranks, stop_groups
from paceline.machine import usable_cores
from paceline.torch_private import COMPILER
from paceline.verify import harness

_POLL_S = 0.02
_PR_SET_PDEATHSIG = 1  # a signal for the ranks when this process is killed
# A rank that lost its peer may fail before the rank that caused it, and all have this time to report.
_SETTLE_S = 0.5


def preload() -> None:
    """Import what the ranks need, before the first fork."""
    torch.set_num_threads(1)
    with contextlib.suppress(ImportError):
        importlib.import_module(COMPILER)  # by the first optimizer otherwise
    gc.freeze()


class ForkedRanks:
    """The ranks of one run.

    Args:
        script: The script and its arguments, or "-m", a module and its arguments.
        environ: Further variables for the ranks.
        output: Where they print to.

    Attributes:
        returncode: The exit code of the rank that failed first, else 0; known when all have ended.
    """

    def __init__(
        self, count: int, script: Sequence[str], environ: Mapping[str, str], output: Path
    ) -> None:
        self.returncode = 0
        self._failed_at: float | None = None
        environ = {**environment_of_ranks(choose_threads(count)[0]), **environ}
        sys.stdout.flush()
        ours: list[socket.socket] = []
        self.pids: list[int] = []
        parent = os.getpid()
        listener = listen(LOOPBACK, 0)
        port = listener.getsockname()[1]
        for rank in range(count):
            end, theirs = socket.socketpair()
            ours.append(end)
            pid = os.fork()
            if pid == 0:
                for each in (*ours, listener):
                    each.close()
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != parent:
                    os._exit(ExitCode.FAILED)  # it was killed before this call
                _become_rank(
                    script, theirs.detach(), environ | _variables(rank, count, port), output
                )
            theirs.close()
            self.pids.append(pid)
        self._running = list(self.pids)
        # After the fork, because its thread would not survive it.
        self._store = store_on(listener, timedelta(minutes=30))
        for each in ours:
            each.close()  # a rank without a launcher prints its errors itself

    def wait(self, timeout_s: float) -> bool:
        """Wait until all ranks have ended; False if some run still. If a rank fails, the others are ended."""
        until = time.monotonic() + timeout_s
        while self._running:
            for pid in list(self._running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self._note_end(pid, os.waitstatus_to_exitcode(status))
            now = time.monotonic()
            if self._failed_at is not None and now - self._failed_at > _SETTLE_S:
                self.end()
            elif now > until:
                return False
            elif self._running:
                time.sleep(_POLL_S)
        stop_groups(self.pids)  # what they left behind
        return True

    def end(self) -> None:
        """End the ranks that run still, and what they have started."""
        stop_groups(self._running)
        for pid in list(self._running):
            os.waitpid(pid, 0)
            self._running.remove(pid)

    def _note_end(self, pid: int, code: int) -> None:
        self._running.remove(pid)
        if code and not self.returncode:
            self.returncode = code if code > 0 else 128 - code
            self._failed_at = time.monotonic()


def _variables(rank: int, count: int, port: int) -> dict[str, str]:
    """Those that torchrun sets for a rank."""
    numbers = {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), rank),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), count),
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    return {name: str(number) for name, number in numbers.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "ROLE_NAME": "default",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "verify",
    }


def _become_rank(
    script: Sequence[str], control: int, environ: Mapping[str, str], output: Path
) -> NoReturn:
    """Run `launch/worker.py` in this fork, as an interpreter would."""
    from paceline.launch import worker

    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, fd in enumerate((os.open(os.devnull, os.O_RDONLY), file, file)):
        os.dup2(fd, number)
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environ, PACELINE_CONTROL_FD=str(control), PACELINE_BEFORE=harness.__name__)
    # torch has read the variable in the parent.
    threads = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(threads) if threads.isdigit() else usable_cores())
    sys.modules["__main__"] = worker
    sys.argv = [str(WORKER), *script]
    sys.orig_argv = [sys.executable, *sys.argv]
    code: object = ExitCode.FAILED
    try:
        worker.main()
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code if isinstance(code, int) else ExitCode.OK)
