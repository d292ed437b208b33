"""Reads stacks of Python threads: which lines are the user's, where the innermost one is, what it calls.

Runs in each rank. launch/worker.py loads this file without importing the package `paceline`, so it may import
only the standard library.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
import re
import sysconfig
from types import CodeType, FrameType, TracebackType
from typing import Any

Frame = tuple[str, int, str]  # file, line, function
Stack = list[Frame]

_LIBRARIES = (
    sysconfig.get_paths()["stdlib"],
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    "<frozen",
)
_PACKAGES = ("site-packages", "dist-packages")  # the second is Debian's, also in NVIDIA's images
_CALL_CHARS = 60
_CRASH_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_STEPS = ("torch/autograd/", "torch/optim/", "torch/nn/utils/clip_grad.py")
_FORWARD = "torch/nn/modules/module.py"
_BOOTSTRAPS = ("multiprocessing/process.py", "threading.py")


def is_script(file: str) -> bool:
    """Whether a file is the user's, not of Paceline or another library."""
    return not file.startswith(_LIBRARIES) and not any(folder in file for folder in _PACKAGES)


def frames_of_script(stack: Stack) -> Stack:
    """The frames of the user's files. If there are none, as in an installed package that was started with
    `-m`: the frames outside of Python's library, torch and Paceline."""
    own = [frame for frame in stack if is_script(frame[0])]
    return own or [
        frame
        for frame in stack
        if not frame[0].startswith(_LIBRARIES)
        and not any(f"{folder}/torch/" in frame[0] for folder in _PACKAGES)
    ]


def place_of_frame(frame: FrameType | None) -> str:
    """The innermost line of the script: `file:line in function`; empty if there is none."""
    return _place(stack_of(frame, to_bootstrap=True))


def place_of_error(trace: TracebackType | None) -> str:
    """The innermost line of the script in a traceback: `file:line in function`; empty if there is none."""
    return _place(stack_of_error(trace))


def stack_of_error(trace: TracebackType | None) -> Stack:
    """File, line and function of each frame of a traceback, innermost first."""
    stack: Stack = []
    while trace is not None:
        code = trace.tb_frame.f_code
        stack.insert(0, (code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return stack


def place_of_crash(text: str) -> str:
    """The innermost line of the script in what faulthandler wrote for a fatal signal; empty if there is none.

    The thread that crashed counts if it runs Python, and else the main thread, which is written last.
    """
    threads = re.split(r"^(?=Current thread 0x|Thread 0x)", text, flags=re.MULTILINE)[1:]
    for thread in [t for t in threads if t.startswith("Current")] + threads[-1:]:
        found = _CRASH_FRAME.findall(thread)
        if place := _place([(file, int(line), name) for file, line, name in found]):
            return place
    return ""


def _place(stack: Stack) -> str:
    frames = frames_of_script(stack)
    return "{}:{} in {}".format(*frames[0]) if frames else ""


def _is_bootstrap(frame: FrameType) -> bool:
    """Whether it is the first frame of a child process. In a forked one, those below it are its parent's."""
    code = frame.f_code
    return code.co_name == "_bootstrap" and code.co_filename.endswith(_BOOTSTRAPS)


def stack_of(frame: FrameType | None, *, to_bootstrap: bool = False) -> Stack:
    """File, line and function of each frame, innermost first.

    Args:
        to_bootstrap: Leave out the frames below `_bootstrap`: in a forked child, they belong to its parent.
    """
    stack: Stack = []
    while frame is not None and not (to_bootstrap and _is_bootstrap(frame)):
        stack.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return stack


def call_of(frame: FrameType | None) -> dict[str, Any]:
    """What the innermost line of the script calls, and the peer of a send or receive."""
    peer = None
    own = frames_of_script(stack_of(frame))
    while frame is not None and own and frame.f_code.co_filename != own[0][0]:
        if frame.f_code.co_name in ("recv", "send"):
            arguments = frame.f_locals
            peer = arguments.get("src", arguments.get("dst", peer))
        frame = frame.f_back
    call = _called_function(frame.f_code, frame.f_lasti) if frame is not None else ""
    return {"call": call, "peer": peer}


def is_in_step(frame: FrameType | None) -> bool:
    """Whether a stack is in a forward of a module in training mode, in a backward, or in an optimizer."""
    while frame is not None:
        file = frame.f_code.co_filename
        if any(part in file for part in _STEPS):
            return True
        if file.endswith(_FORWARD) and getattr(frame.f_locals.get("self"), "training", False):
            return True
        frame = frame.f_back
    return False


def _called_function(code: CodeType, offset: int) -> str:
    """The function that the instruction at `offset` calls, as written in the source."""
    positions = list(code.co_positions())
    line, end_line, start, end = positions[offset // 2]
    if line is None or end_line is None or start is None or end is None:
        return ""
    lines = [text.encode() for text in linecache.getlines(code.co_filename)[line - 1 : end_line]]
    if not lines:
        return ""
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    with contextlib.suppress(SyntaxError, ValueError):
        tree = ast.parse(b"".join(lines).decode(errors="replace").strip(), mode="eval").body
        if isinstance(tree, ast.Call):
            return ast.unparse(tree.func)[:_CALL_CHARS]
    return ""
