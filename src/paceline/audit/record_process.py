"""Records the process of a rank: its start, seeds, forks, ranks of its own, and its end.

It also seeds the script and turns `torch.compile` off.
"""

from __future__ import annotations

import ast
import atexit
import hashlib
import inspect
import linecache
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import distributed_c10d as c10d
from torch.multiprocessing import SpawnContext

from paceline.audit.digests import digest, leaves, seed_all
from paceline.audit.events import (
    CompileCalled,
    ExitCalled,
    Failed,
    FileRead,
    FileWritten,
    Forked,
    GroupInitialised,
    OwnFileRead,
    OwnRanksStarted,
    ProcessStarted,
    RankEnded,
    RankStarted,
    SeedSet,
)
from paceline.audit.models import Models, buffer_digests
from paceline.audit.progress import Progress
from paceline.audit.record import (
    calling_frame,
    calling_line,
    frames,
    intercept,
    is_user_code,
    line_of,
    user_line,
)
from paceline.data.digest import has_content

_SEED = 20_260


def install(progress: Progress, models: Models, control: object) -> None:
    """Record the start of this rank now, and what becomes of it later.

    Args:
        control: The rank's connection to the command. Its `send` carries the error of a failed script.
    """
    progress.recorder.write(
        RankStarted(
            cores=sorted(os.sched_getaffinity(0)),
            cuda_devices=torch.cuda.device_count(),
        )
    )
    # For a script that sets no seed, so that its runs can be compared. In the ordinary run each rank has its
    # own seed, as it would have without `verify`.
    seed_all(_SEED + (progress.rank if progress.plan.mode == "ordinary" else 0))
    # torch warns about module hooks under torch.compile at each call; a script may turn that into an error.
    warnings.filterwarnings(
        "ignore", message=r"Using `torch.compile\(module\)` when there are global"
    )
    hooks = ProcessHooks(progress, models)
    intercept("manual_seed", hooks.set_seed, torch, torch.random)
    intercept("compile", hooks.compile_eagerly, torch)
    intercept("init_process_group", hooks.init_process_group, c10d, dist)
    intercept("start_processes", hooks.start_processes, sys.modules[SpawnContext.__module__], mp)
    intercept("start", hooks.start_process, multiprocessing.process.BaseProcess)
    intercept("send", hooks.send, control)
    intercept("exit", hooks.exit, sys)
    intercept("save", hooks.save, torch, torch.serialization)
    os.register_at_fork(before=hooks.before_fork)
    if progress.plan.mode != "solo":
        sys.addaudithook(hooks.audit)
    atexit.register(hooks.at_exit)


class ProcessHooks:
    """What a rank does as a process."""

    def __init__(self, progress: Progress, models: Models) -> None:
        self._progress, self._models = progress, models
        self._recorder = progress.recorder
        self._began_s = time.time()

    def set_seed(self, seed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._recorder.write(SeedSet(at=calling_line()))
        return seed(*args, **kwargs)

    def compile_eagerly(self, compile_: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make compiled functions run eagerly, because a compiled graph cannot contain the hooks."""
        self._recorder.write(CompileCalled(at=user_line()))
        torch.compiler.set_stance("force_eager")
        return compile_(*args, **kwargs)

    def init_process_group(
        self, initialise: Callable[..., Any], backend: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if multiprocessing.parent_process() is not None and not dist.is_initialized():
            self._end_spawning("init_process_group() in processes that it starts")
        self._recorder.write(GroupInitialised(at=user_line(), backend=backend))
        result = initialise(backend, *args, **kwargs)
        self._recorder.write(GroupInitialised(at=user_line(), size=dist.get_world_size()))
        return result

    def start_processes(self, start: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not dist.is_initialized() and not self._progress.steps:
            self._end_spawning("torch.multiprocessing.spawn()")
        return start(*args, **kwargs)

    def start_process(self, start: Callable[..., None], *args: Any) -> None:
        if at := calling_line():  # else a library did
            self._recorder.write(ProcessStarted(at=at))
        start(*args)

    def _end_spawning(self, call: str) -> None:
        self._recorder.write(OwnRanksStarted(at=user_line(), call=call))
        self._progress.end()

    def before_fork(self) -> None:
        """Record a fork by the script itself, not by loaders or subprocesses."""
        for frame in frames():
            module = frame.f_globals.get("__name__", "")
            if module.startswith(("multiprocessing", "subprocess", "torch")):
                return
            if is_user_code(frame):
                self._recorder.write(Forked(at=line_of(frame)))
                return

    def send(self, send: Callable[..., bool], event: dict[str, Any]) -> bool:
        if event.get("event") in ("final_error", "exit", "interrupted"):
            names = {each.name for each in fields(Failed)}
            facts = event | event.get("error", {})
            self._recorder.write(Failed(**{k: v for k, v in facts.items() if k in names}))
        return send(event)

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Record which files the script writes, and which it reads that verification or it has written."""
        with suppress(Exception):  # what cannot be recorded must not stop the script
            self._record_file(event, args)

    def _record_file(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[1], str):
            if (path := self._path_of(args[0])) and not set(args[1]).isdisjoint("wxa"):
                # "r+" is none of them: numpy.memmap maps data with it.
                self._record_write(path, is_whole="a" in args[1])
            elif path:
                self._record_read(path)
        elif event == "os.rename" and (path := self._path_of(args[1])):
            with open(args[0], "rb") as file:
                content = digest(hashlib.file_digest(file, "sha256").hexdigest())
            self._record_write(path, content=content, is_whole=True)

    def _record_write(self, path: Path, *, content: int = 0, is_whole: bool = False) -> None:
        if not path.is_dir() and (at := user_line()):  # a temporary file without a name
            steps = self._progress.steps
            self._recorder.write(
                FileWritten(
                    at=at, path=str(path), steps_done=steps, content=content, is_whole=is_whole
                )
            )

    def _record_read(self, path: Path) -> None:
        with suppress(OSError):
            found = path.stat()
            if found.st_mtime < self._progress.plan.begun_s or not (at := user_line()):
                return
            self._recorder.write(FileRead(at=at, path=str(path), steps_done=self._progress.steps))
            if found.st_size and found.st_mtime < self._began_s:
                self._recorder.write(OwnFileRead(at=at, path=str(path)))

    def save(self, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """torch opens the file in C++, which the audit hook does not see."""
        with suppress(Exception):  # what cannot be recorded may be saved all the same
            self._record_save(**inspect.signature(save).bind(*args, **kwargs).arguments)
        save(*args, **kwargs)

    def _record_save(self, obj: Any, f: Any, **_: Any) -> None:
        path = self._path_of(f if isinstance(f, str | os.PathLike) else getattr(f, "name", None))
        if path is not None:
            # Other objects would count by their addresses.
            known = [x for x in leaves(obj) if has_content(x) or isinstance(x, int | float | str)]
            self._record_write(path, content=digest(known))

    def _path_of(self, file: Any) -> Path | None:
        """The absolute path of a file that rules may look at."""
        if not isinstance(file, str | os.PathLike):
            return None
        path = Path(os.path.realpath(file))
        is_own = self._progress.plan.folder.parent in path.parents
        is_module = path.suffix in (".py", ".pyc", ".so")
        return None if is_own or is_module or path.parts[1:2] in (("dev",), ("proc",)) else path

    def exit(self, exit_: Callable[..., NoReturn], *code: Any) -> NoReturn:
        by = str(calling_frame().f_globals.get("__name__"))
        # The end of the rank itself has no line: below it are the frames of the command that was forked.
        at = "" if by.startswith("paceline.") else user_line()
        in_loop = any(_is_in_loop_body(frame) for frame in frames() if is_user_code(frame))
        first = code[0] if code else None
        self._recorder.write(ExitCalled(at=at, by=by, code=first, in_loop=in_loop))
        exit_(*code)

    def at_exit(self) -> None:
        """Record the end. It is missing after an uncaught error, a kill and `os._exit`."""
        models = self._models.by_number()
        buffers = {str(number): buffer_digests(model) for number, model in models.items()}
        self._recorder.write(RankEnded(buffers=buffers))


def _is_in_loop_body(frame: FrameType) -> bool:
    """Whether a frame is in the body of a loop, by the source of its file."""
    tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    bodies = (node.body for node in ast.walk(tree) if isinstance(node, ast.For | ast.While))
    return any(own[0].lineno <= frame.f_lineno <= (own[-1].end_lineno or 0) for own in bodies)
