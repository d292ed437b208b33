"""Records what the user's script does. `paceline verify` installs it in each rank before the script starts.

The variable `PACELINE_BEFORE` names this module, and the launcher's worker calls `install`. Global hooks of
torch are used where they exist. Other functions (loaders, collectives, clipping, loading) are replaced by
recording functions before the script imports them.
"""

from __future__ import annotations

import atexit
import os
import random
import socket
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NoReturn

import numpy
import torch

from paceline.audit import record_collectives, record_data, record_loop, record_training
from paceline.audit.events import (
    CompileCalled,
    ExitCalled,
    Failed,
    Forked,
    RankEnded,
    RankStarted,
    SeedSet,
)
from paceline.audit.models import Models, buffer_digests
from paceline.audit.progress import Progress
from paceline.audit.record import Recorder, frames, intercept, is_user_code, line_of, user_line
from paceline.audit.run_plan import RunPlan
from paceline.audit.weight_tracer import WeightTracer
from paceline.verify import record_paceline

_SEED = 20_260


def install(control: object) -> None:
    """Install all hooks in this rank.

    Args:
        control: The rank's connection to its launcher. Its `send` carries the error of a failed script.
    """
    plan = RunPlan.from_environment()
    rank = int(os.environ["RANK"])
    recorder = Recorder(plan.folder, rank)
    recorder.write(
        RankStarted(
            host=socket.gethostname(),
            cores=sorted(os.sched_getaffinity(0)),
            cuda_devices=torch.cuda.device_count(),
        )
    )
    _seed(recorder, _SEED + (rank if plan.mode == "ordinary" else 0))
    _disable_compilation(recorder)
    progress = Progress(plan, recorder, rank)
    models = Models(recorder)
    tracer = WeightTracer(progress, models)
    record_training.install(progress, models, tracer)
    record_loop.install(progress, models, tracer)
    record_data.install(progress)
    record_collectives.install(progress)
    record_paceline.install(progress)
    os.register_at_fork(before=lambda: _record_fork(recorder))
    _record_end(recorder, progress, models, control)


def _seed(recorder: Recorder, seed: int) -> None:
    """Seed a script that sets no seed itself, so that its runs can be compared; record if it sets one.

    In the ordinary run each rank has its own seed, as it would have without `verify`.
    """
    random.seed(seed)
    torch.manual_seed(seed)
    numpy.random.seed(seed)

    def set_seed(seed_: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        recorder.write(SeedSet())
        return seed_(*args, **kwargs)

    intercept("manual_seed", set_seed, torch, torch.random)


def _disable_compilation(recorder: Recorder) -> None:
    """Make compiled functions run eagerly, because a compiled graph cannot contain the hooks."""

    def compile_eagerly(compile_: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        recorder.write(CompileCalled(at=user_line()))
        torch.compiler.set_stance("force_eager")
        return compile_(*args, **kwargs)

    intercept("compile", compile_eagerly, torch)
    # torch warns about module hooks under torch.compile at each call; a script may turn that into an error.
    warnings.filterwarnings(
        "ignore", message=r"Using `torch.compile\(module\)` when there are global"
    )


def _record_fork(recorder: Recorder) -> None:
    """Record a fork by the script itself, not by loaders or subprocesses."""
    for frame in frames():
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("multiprocessing", "subprocess", "torch")):
            return
        if is_user_code(frame):
            recorder.write(Forked(at=line_of(frame)))
            return


def _record_end(recorder: Recorder, progress: Progress, models: Models, control: object) -> None:
    """Record how the script ends. If nothing is recorded, it was killed or called `os._exit`."""

    def send(send_: Callable[..., bool], event: dict[str, Any]) -> bool:
        if event.get("event") in ("failed", "exit", "interrupted"):
            names = {each.name for each in fields(Failed)}
            recorder.write(Failed(**{k: v for k, v in event.items() if k in names}))
        return send_(event)

    def exit_script(exit_: Callable[..., NoReturn], *code: Any) -> NoReturn:
        by = str(sys._getframe(2).f_globals.get("__name__"))
        # The end of the rank itself has no line: below it are the frames of the command that was forked.
        at = "" if by.startswith("paceline.") else user_line()
        recorder.write(ExitCalled(at=at, by=by, code=code[0] if code else None))
        exit_(*code)

    def at_exit() -> None:
        buffers = {str(number): buffer_digests(m) for number, m in models.by_number().items()}
        recorder.write(RankEnded(buffers=buffers, wanted=progress.wanted))

    intercept("send", send, control)
    intercept("exit", exit_script, sys)
    atexit.register(at_exit)
