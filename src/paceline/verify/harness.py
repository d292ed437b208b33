"""What `paceline verify` puts into each rank before the user's script: it watches, and writes down.

It is installed by the launcher's worker (`PACELINE_BEFORE`) and lives in verification runs alone. What
torch has a global hook for is watched through that hook; the rest (loaders, collectives, clipping,
loading) by wrapping the function that the user's script is about to import.
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
from paceline.audit.record import Recorder, is_users, place, place_of
from paceline.audit.watch_changes import Changes
from paceline.verify import watch_paceline

_SEED = 20_260


class Control(Protocol):
    """The rank's line to its launcher, over which a failed script's error goes."""

    def send(self, event: dict[str, Any]) -> bool:
        """Tell the launcher."""


def install(control: Control) -> None:
    """Watch this rank."""
    plan = RunPlan.from_environment()
    rank = int(os.environ["RANK"])
    recorder = Recorder(plan.folder, rank)
    recorder.write(
        "start",
        pid=os.getpid(),
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        host=socket.gethostname(),
        cores=sorted(os.sched_getaffinity(0)),
        cuda_devices=torch.cuda.device_count(),
    )
    if plan.mode != "ordinary":
        # A script that sets no seed starts these runs alike; one that does is not changed by it.
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
    os.register_at_fork(before=lambda: _note_fork(recorder))
    _watch_end(recorder, progress, models, control)


def _disable_compilation(recorder: Recorder) -> None:
    """Have `torch.compile` run its functions eagerly: a graph cannot contain the watchers' hooks."""
    compile_ = torch.compile

    @functools.wraps(compile_)
    def eager(*args: Any, **kwargs: Any) -> Any:
        recorder.write("compile", at=place())
        torch.compiler.set_stance("force_eager")
        return compile_(*args, **kwargs)

    torch.compile = eager
    # torch warns of module hooks under torch.compile at each call; a script may turn that into an error.
    warnings.filterwarnings(
        "ignore", message=r"Using `torch.compile\(module\)` when there are global"
    )


def _note_fork(recorder: Recorder) -> None:
    """Tell a fork of the script's own from those of loaders and subprocesses."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("multiprocessing", "subprocess", "torch")):
            return
        if is_users(frame.f_code.co_filename):
            recorder.write("fork", at=place_of(frame))
            return
        frame = frame.f_back


def _watch_end(recorder: Recorder, progress: Progress, models: Models, control: Control) -> None:
    """Note how the script ended; an end without a note is a kill or `os._exit`."""
    send = control.send

    def noted(event: dict[str, Any]) -> bool:
        if event.get("event") in ("failed", "exit", "interrupted"):
            recorder.write("failed", steps=progress.steps, **event)
        return send(event)

    def noted_exit(code: object = None) -> NoReturn:
        recorder.write("exit", at=place())
        leave(code)  # type: ignore[arg-type]

    control.send = noted  # type: ignore[method-assign]
    leave, sys.exit = sys.exit, noted_exit
    atexit.register(lambda: _note_end(recorder, progress, models))


def _note_end(recorder: Recorder, progress: Progress, models: Models) -> None:
    buffers = {number: buffer_digests(model) for number, model in models.all().items()}
    recorder.write("end", steps=progress.steps, buffers=buffers)
