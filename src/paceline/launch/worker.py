"""The first code of a rank: connects to the launcher, and runs the script.

    python worker.py SCRIPT [ARGUMENTS]
    python worker.py -m MODULE [ARGUMENTS]

It runs scripts as `python script.py` and `python -m module` do, with the same `__main__`, `sys.argv` and
`sys.path`. It is started by file name and needs only the standard library: torch and paceline are imported
only if the script imports them.

No file in this folder may have the name of a module of the standard library.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

_FLUSH_S = 2.0
_TRACEBACK_CHARS = 200_000
# How the script ended; `_finish` ends the process in the same way.
_status = 0
_interrupted = False
_control: Control | None = None  # of this rank


def _load(*names: str) -> Any:
    # By file: the folder of paceline may not be on sys.path, or the script's folder may hide it.
    module = types.ModuleType(".".join(["paceline", *names]))
    package = os.path.dirname(os.path.dirname(__file__))
    module.__file__ = os.path.join(package, *names) + ".py"
    # The full name lets these files import each other without importing paceline.
    sys.modules[module.__name__] = module
    importlib.machinery.SourceFileLoader(module.__name__, module.__file__).exec_module(module)
    return module


_load("exit_codes")
_stacks = _load("watch", "stacks")
_crash_facts = _load("watch", "crash")
_load("watch", "flight_recorder")
_probe = _load("watch", "probe")


class Control:
    """This rank's end of the socket to its launcher.

    Args:
        fd: The socket.
        probe: Answers the launcher's requests for the rank's state; None if it is switched off.
    """

    def __init__(self, fd: int, probe: Any) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._probe = probe
        self._lock = threading.Lock()
        self.begun = threading.Event()  # of a standby process: it becomes a rank
        # A forked child is not the rank: it must neither send events nor keep the socket open.
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._listen, name="paceline-control", daemon=True).start()

    def send(self, event: dict[str, Any]) -> bool:
        """Send an event to the launcher; False if that is not possible."""
        # The empty line ends anything that a script may have written here.
        # A state of the script may hold any value, such as a NumPy number for the peer of a recv.
        line = b"\n" + json.dumps(event, default=str).encode() + b"\n"
        try:
            with self._lock:
                self._socket.sendall(line)
        except OSError:
            return False
        return True

    def send_state(self, number: int) -> None:
        """Answer the launcher's question for this rank's state, if the probe is not switched off."""
        if self._probe is not None:
            self._probe.answer(number, self.send)

    def _listen(self) -> None:
        received = b""
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                return  # the launcher has ended; its guard (guard.py) kills this rank and its children
            *lines, received = (received + data).split(b"\n")
            for line in lines:
                self._do(json.loads(line))

    def _do(self, request: dict[str, Any]) -> None:
        match request["do"]:
            case _probe.STATE:
                self.send_state(request["id"])
            case "begin":  # of a standby process
                os.environ.update(request["environment"])
                self.begun.set()
            case "recover":
                if recovery := sys.modules.get("paceline.job.recovery"):
                    recovery.announced.add(request["generation"])
            case "give_up_recovery":
                if recovery := sys.modules.get("paceline.job.recovery"):
                    recovery.announced.add(recovery.GIVEN_UP)
            case "peer_failed":
                if failures := sys.modules.get("paceline.job.failures"):
                    failures.killed_ranks.update(request["killed"])
                    failures.peer_failed.set()
            case "ignore_preemption":
                _ignore_preemption()
            case "disconnect":
                _disconnect(request["addresses"])
            case "end":
                _end()

    def _forget(self) -> None:
        self._socket.close()
        self._probe = None
        self._lock = threading.Lock()  # another thread may have held it at the fork
        os.environ.pop("PACELINE_CONTROL_FD", None)


def main() -> NoReturn:
    """Run one rank."""
    global _control, _status
    fd = os.environ.pop("PACELINE_PROBE_FD", "")
    probe = _probe.Probe(int(fd)) if fd else None
    control = _control = Control(int(os.environ["PACELINE_CONTROL_FD"]), probe)
    # The interpreter has put this folder there. `_run` puts the script's folder there.
    if not sys.flags.safe_path:
        del sys.path[0]
    # Registered before the functions of torch and the script, so it runs after them.
    atexit.register(_finish)
    if probe is not None:
        _AfterImport.install("torch.optim.optimizer", probe.count_optimizer_steps)
    # A crash in native code shows its Python line. Gloo aborts in a thread of its own, so all threads.
    if not faulthandler.is_enabled():
        faulthandler.enable()
    if modules := os.environ.pop("PACELINE_STANDBY", ""):
        for name in modules.split(","):
            importlib.import_module(name)
        control.begun.wait()
    # The command line that an interpreter for this script would have; some scripts start again with it.
    sys.orig_argv = [*sys.orig_argv[: sys.orig_argv.index(sys.argv[0])], *sys.argv[1:]]
    module = sys.argv[2] if sys.argv[1] == "-m" else None
    sys.argv = sys.argv[2:] if module else sys.argv[1:]
    # Of `paceline verify` and `paceline profile`: a module that prepares this process for the script.
    if harness := os.environ.pop("PACELINE_BEFORE", ""):
        importlib.import_module(harness).install(control)
    _status = _run(module, control)
    sys.exit(_status)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module when the module has been imported."""

    def __init__(self, name: str, function: Callable[[Any], None]) -> None:
        self._name, self._function = name, function

    @classmethod
    def install(cls, name: str, function: Callable[[Any], None]) -> None:
        """Call the function with the module of this name; at once, if it is loaded already."""
        if name in sys.modules:
            function(sys.modules[name])
        else:
            sys.meta_path.insert(0, cls(name, function))

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """See importlib."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: types.ModuleType) -> None:
                execute(module)
                self._function(module)

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def _ignore_preemption() -> None:
    """A peer has failed: a training must not treat the next SIGTERM as a preemption."""
    if preemption := sys.modules.get("paceline.job.preemption"):
        preemption.notice.end()


def _disconnect(addresses: list[str]) -> None:
    """Break this process's connections to these hosts; a collective that waits for one fails at once."""
    family, kind = socket.AF_INET, socket.SOCK_STREAM  # of most; the kernel knows the true one
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue  # `fromfd` would leave a copy of it open
        with contextlib.suppress(OSError), socket.fromfd(int(name), family, kind) as connection:
            peer = connection.getpeername()  # an error if it has no peer
            if isinstance(peer, tuple) and str(peer[0]).removeprefix("::ffff:") in addresses:
                connection.shutdown(socket.SHUT_RDWR)


def _end() -> None:
    """A second signal: end at once."""
    if preemption := sys.modules.get("paceline.job.preemption"):
        preemption.notice.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def _run(module: str | None, control: Control) -> int:
    global _interrupted
    hook = sys.excepthook
    # This reference keeps the module alive: the functions of this file need its globals.
    bootstrap = sys.modules["__main__"]
    # `from paceline.launch import worker` in the script gives this running file.
    sys.modules["paceline.launch.worker"] = bootstrap
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        if module:
            if not sys.flags.safe_path:
                sys.path.insert(0, os.getcwd())
            # `python -m` calls this too. run_module() would restore our __main__ before atexit functions run.
            runpy._run_module_as_main(module)  # type: ignore[attr-defined]
        else:
            _run_path(sys.argv[0])
    except SystemExit as error:
        return _exit_code(error, control)
    except KeyboardInterrupt as error:
        control.send({"event": "interrupted", "place": _stacks.place_of_error(error.__traceback__)})
    except BaseException as error:
        _crash(error, control, hook)
    else:
        return 0
    # As in the interpreter: threads and atexit functions end first, then the signal kills the process. A new
    # error is raised, because the caught one holds the script's frames.
    _interrupted = True
    sys.excepthook = lambda *args: None
    raise KeyboardInterrupt


def _run_path(script: str) -> None:
    main_module = sys.modules["__main__"]
    if (source := _read_source(script)) is None:
        sys.path.insert(0, script)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    path = os.path.abspath(script)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main_module.__dict__.update(
        __file__=path, __loader__=loader, __builtins__=builtins, __annotations__={}, __cached__=None
    )
    exec(compile(source, path, "exec", dont_inherit=True), main_module.__dict__)


def _read_source(script: str) -> bytes | None:
    """The source of a script; None for a directory or zip archive with a __main__.py."""
    if os.path.isdir(script):
        return None
    with open(script, "rb") as file:  # once: it may be a pipe, such as /dev/stdin
        begin = file.read(4)
        return None if begin == b"PK\x03\x04" else begin + file.read()


def _exit_code(error: SystemExit, control: Control) -> int:
    code = error.code
    if code is None:
        return 0
    if not isinstance(code, int):
        print(code, file=sys.stderr, flush=True)
        code = 1
    if code & 0xFF:
        if (handled := _handled_by(error)) is not None:
            control.send(_describe(handled, "seen_error"))
        control.send({"event": "exit", "place": _stacks.place_of_error(error.__traceback__)})
    return code & 0xFF


def _handled_by(error: SystemExit) -> Exception | None:
    """The exception that the script was handling when it called sys.exit(), as Hydra does after an error."""
    handled: BaseException | None = error
    while isinstance(handled, SystemExit):
        hidden = None if handled.__suppress_context__ else handled.__context__
        handled = handled.__cause__ or hidden
    return handled if isinstance(handled, Exception) else None


def _crash(error: BaseException, control: Control, hook: Callable[..., Any]) -> NoReturn:
    """Report the error to the launcher and end at once, without waiting for peers."""
    shown = False
    user_hook = _user_hook(hook, error)
    if user_hook is not None:
        # The hook may end the process, or be a debugger that stays.
        control.send(_describe(error, "seen_error", shown=True))
        try:
            user_hook(type(error), error, _strip(error.__traceback__))
            shown = True
        except BaseException as broken:
            print(f"sys.excepthook raised {type(broken).__name__}: {broken}", file=sys.stderr)
    event = _describe(error, "final_error", shown=shown)
    report = event["error"]
    if not control.send(event):
        print(report["traceback"], file=sys.stderr)
    in_collective = report["lost_peer"] or report["module"].startswith("torch.distributed")
    if in_collective:  # the collective that failed, and its tensors
        control.send_state(_probe.UNSOLICITED_ID)
    # os._exit() flushes nothing, and the last lines before a crash are the important ones. A thread does it,
    # because a full pipe would block forever.
    flusher = threading.Thread(target=_flush_files, daemon=True)
    flusher.start()
    flusher.join(_FLUSH_S)
    os._exit(_crash_facts.exit_code_of(error))


def report_before_clean_up(error: BaseException) -> None:
    """Tell the launcher, if this is a rank, of an error whose clean-up may take longer than it waits."""
    if _control is not None:
        _control.send(_describe(error, "seen_error"))


def report(event: str, *, step: int = 0, generation: int = 0) -> bool:
    """Tell the launcher of an event without an error (`local_ranks.Event`); False if that is not possible."""
    sent = {"event": event, "step": step, "generation": generation}
    return _control is not None and _control.send(sent)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error was raised because another rank was lost."""
    return bool(_crash_facts.Error.of(error, "").lost_peer)


def report_training(saves_after_failure: bool) -> None:
    """Tell the launcher, if this is a rank, that a training handles preemption signals.

    Args:
        saves_after_failure: Whether it may also save its last step when another rank fails.
    """
    report("training")
    if saves_after_failure:
        report("saves_after_failure")


def _describe(error: BaseException, event: str, **more: Any) -> dict[str, Any]:
    """The event about an error; `more` replaces fields of `Error`."""
    facts: dict[str, Any] = dataclasses.asdict(_crash_facts.Error.of(error, _format(error)))
    facts["message"] = facts["message"][:_TRACEBACK_CHARS]
    return {
        "event": event,
        "error": facts | more,
        "time": time.time(),
        "step": getattr(sys.modules.get("paceline.job.current_step"), "step", 0),
    }


def _format(error: BaseException) -> str:
    rendered = traceback.TracebackException(type(error), error, _strip(error.__traceback__))
    text = "".join(rendered.format())
    if len(text) > _TRACEBACK_CHARS:
        half = _TRACEBACK_CHARS // 2
        text = f"{text[:half]}\n  ... {len(text) - 2 * half} characters omitted ...\n{text[-half:]}"
    return text


def _strip(trace: types.TracebackType | None) -> types.TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def _user_hook(ours: Callable[..., Any], error: BaseException) -> Callable[..., Any] | None:
    """The script's own sys.excepthook; None if it has none."""
    hook: Any = sys.excepthook
    while True:
        home = getattr(hook, "__module__", "")
        if home == "torch.distributed.distributed_c10d":
            # init_process_group() wraps the hook to add the rank, which the launcher does as well.
            cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=False))
            inner = cells["old_hook"].cell_contents if "old_hook" in cells else None
        elif home == "paceline.job.failures":
            # The hook of join() would end the process before the error is reported.
            hook.mark_failed(error)
            inner = hook.previous
        else:
            return None if hook in (ours, sys.__excepthook__) else hook
        hook = ours if inner is None else inner


def _flush_files() -> None:
    # The standard streams may be older than a gc.freeze(), after which gc.get_objects() does not list them.
    for thing in (sys.stdout, sys.stderr, *gc.get_objects()):
        if type(thing) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            with contextlib.suppress(OSError, ValueError):
                thing.flush()
    ctypes.CDLL(None).fflush(None)


def _finish() -> None:
    """End a clean run, after all other atexit functions.

    With torch 2.13 and Gloo, about 1 clean run in 10 aborts while its interpreter shuts down: a thread of
    Gloo releases the tensor of the last collective, needs the GIL of an interpreter that has ended, and is
    ended inside C++ code. `destroy_process_group()` makes this rarer but not impossible: a group that DDP
    has used keeps its threads. If such threads exist, the rest of the shutdown is skipped. Python has joined
    threads and run atexit functions by then; this function finalises the script's objects and flushes files.
    """
    if not _has_group_threads():
        return
    _drop_script()
    _flush_files()
    if _interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(_status)


def _has_group_threads() -> bool:
    """Whether there is a process group, or a thread that a destroyed one has left."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return False
    if distributed.is_initialized():
        return True
    for thread in os.listdir("/proc/self/task"):
        # A thread may end during this loop.
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
            if file.read().startswith(("pt_gloo", "pt_nccl")):
                return True
    return False


def _drop_script() -> None:
    """Finalise the script's objects, as the end of an interpreter does."""
    # Only the script's globals hold this loader, so it exists as long as they do. pdb, for one, removes it.
    loader = getattr(sys.modules.get("__main__"), "__loader__", None)
    witness = (lambda: None) if loader is None else weakref.ref(loader)
    del loader
    # The globals are released, not cleared, so that finalizers still see them.
    sys.modules["__main__"] = types.ModuleType("__main__")
    gc.collect()
    for holder in gc.get_referrers(witness()) if witness() is not None else ():
        # The globals still exist, because something, such as atexit, holds a function of the script.
        if type(holder) is dict and holder.get("__name__") == "__main__":
            for name, value in list(holder.items()):
                if not isinstance(value, (types.ModuleType, types.FunctionType, type)):
                    holder[name] = None
    gc.collect()


if __name__ == "__main__":
    main()
