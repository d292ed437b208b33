"""What `paceline verify` installs in each rank before the user's script: it records what the script does.

The launcher's worker installs it (`PACELINE_BEFORE`), in verification runs only. Where torch has a global
hook, that hook is used; other functions (loaders, collectives, clipping, loading) are wrapped before the
script imports them.
"""

from __future__ import annotations

import atexit
import functools
import os
import random
import socket
import sys
import warnings
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch

from paceline.audit import watch_collectives, watch_data, watch_loop, watch_training
from paceline.audit.evidence import RunPlan
from paceline.audit.models import Models, buffer_digests
from paceline.audit.progress import Progress
from paceline.audit.record import Recorder, is_user_code, line_of, user_line
from paceline.audit.watch_changes import Changes
from paceline.verify import watch_paceline

_SEED = 20_260


class Control(Protocol):
    """The rank's connection to its launcher, which carries the error of a failed script."""

    def send(self, event: dict[str, Any]) -> bool:
        """Send an event to the launcher."""


def install(control: Control) -> None:
    """Watch this rank."""
    plan = RunPlan.from_environment()
    rank = int(os.environ["RANK"])
    recorder = Recorder(plan.folder, rank)
    recorder.write(
        "start",
        rank=rank,
        host=socket.gethostname(),
        cores=sorted(os.sched_getaffinity(0)),
        cuda_devices=torch.cuda.device_count(),
    )
    if plan.mode != "ordinary":
        # Gives a script without a seed the same start in these runs; its own seed comes later.
        random.seed(_SEED)
    _disable_compilation(recorder)
    progress = Progress(plan, recorder, rank)
    models = Models(recorder)
    changes = Changes(progress, models)
    watch_training.install(progress, models, changes)
    watch_loop.install(progress, models, changes)
    watch_data.install(progress)
    watch_collectives.install(progress)
    watch_paceline.install(progress)
    os.register_at_fork(before=lambda: _record_fork(recorder))
    _record_end(recorder, progress, models, control)


def _disable_compilation(recorder: Recorder) -> None:
    """Have `torch.compile` run its functions eagerly: a graph cannot contain the watchers' hooks."""
    compile_ = torch.compile

    @functools.wraps(compile_)
    def eager(*args: Any, **kwargs: Any) -> Any:
        recorder.write("compile", at=user_line())
        torch.compiler.set_stance("force_eager")
        return compile_(*args, **kwargs)

    torch.compile = eager
    # torch warns of module hooks under torch.compile at each call; a script may turn that into an error.
    warnings.filterwarnings(
        "ignore", message=r"Using `torch.compile\(module\)` when there are global"
    )


def _record_fork(recorder: Recorder) -> None:
    """Record a fork by the script itself, not by loaders or subprocesses."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("multiprocessing", "subprocess", "torch")):
            return
        if is_user_code(frame.f_code.co_filename):
            recorder.write("fork", at=line_of(frame))
            return
        frame = frame.f_back


def _record_end(recorder: Recorder, progress: Progress, models: Models, control: Control) -> None:
    """Record how the script ends; an end without a record is a kill or `os._exit`."""
    send, exit_ = control.send, sys.exit

    def recording_send(event: dict[str, Any]) -> bool:
        if event.get("event") in ("failed", "exit", "interrupted"):
            recorder.write("failed", steps=progress.steps, **event)
        return send(event)

    def recording_exit(code: object = None) -> NoReturn:
        recorder.write("exit", at=user_line())
        exit_(code)  # type: ignore[arg-type]

    def at_exit() -> None:
        buffers = {number: buffer_digests(model) for number, model in models.all().items()}
        recorder.write("end", steps=progress.steps, buffers=buffers)

    control.send = recording_send  # type: ignore[method-assign]
    sys.exit = recording_exit
    atexit.register(at_exit)
