"""The state of a rank: where it is, and which collectives it entered. Parses what the rank reported. Pure.

The sources are torch's flight recorder, the beats and stacks of probe.py, and the stacks of faulthandler.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.watch.stacks import Frame, frames_of_script

HELD = ("T", "t")  # states of a process that SIGSTOP or a debugger has stopped
FORKED_BESIDE = "forked beside thread"  # of a worker that waits for a lock
LATE_BEAT_S = 1.2  # a beat this old means that no Python thread runs
_DTYPES = {"Float": "f32", "Double": "f64", "Half": "f16", "BFloat16": "bf16", "Bool": "bool"}
_DTYPES |= {"Int": "i32", "Long": "i64", "Short": "i16", "Char": "i8", "Byte": "u8"}
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
# Where torch.distributed waits for other ranks. Others of its functions may save files, or compute.
_WAITS = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/rendezvous.py",
    "torch/distributed/elastic/utils/store.py",
    "torch/distributed/fsdp/_fully_shard/_fsdp_",
    "torch/distributed/pipelining/schedules.py",
    "paceline/job/collectives.py",
    "paceline/job/exchange.py",
    "paceline/job/job.py",
)
_PICKLES = ("_object_to_tensor", "_tensor_to_object")  # functions of those files that compute
# Innermost files of a thread that sleeps: until the next look into the store, or until a future has a result.
_BLOCKS = ("/threading.py", "torch/_ops.py")
_DECORATORS = ("wrapper", "inner_func", "<module>")
_OURS = "paceline's "
_LOADERS = ("torch/utils/data/dataloader.py", "paceline/data/workers.py")
_LOCKS = (
    *("/threading.py", "/queue.py", "/selectors.py", "/subprocess.py"),
    *(f"multiprocessing/{name}.py" for name in ("queues", "synchronize", "connection")),
    "concurrent/futures/_base.py",
)
# Loops in which a server waits for requests; asyncio's is also that of uvicorn, aiohttp and grpc.aio. A rank
# that waits for a remote call, or at the end of `paceline.rpc`, answers calls of others in its threads.
_SERVERS = (
    *("/socketserver.py", "/asyncio/base_events.py", "/grpc/_server.py"),
    *("torch/distributed/rpc/api.py", "paceline/job/rpc.py"),
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A collective that a rank has entered.

    Args:
        number: Counts the collectives of the group and backend, from 1.
        group: The name of the group; `0` means all ranks.
        backend: The backend of the group, such as `gloo`.
        members: Ranks of the group; empty if unknown.
        axis: The axis of a device mesh that the group is on; empty if none.
        tensor_text: Type and shape of its tensor, such as `f32[3,4]`.
        since_s: Seconds since it was entered.
        completed: Whether it has ended.
    """

    name: str
    number: int
    group: str = "0"
    backend: str = "gloo"
    members: tuple[int, ...] = ()
    axis: str = ""
    tensor_text: str = ""
    since_s: float = 0.0
    completed: bool = False

    @property
    def group_and_backend(self) -> str:
        """Group and backend, such as `0 gloo`: the collectives that `number` counts."""
        return f"{self.group} {self.backend}"

    @property
    def tensor_size(self) -> str:
        """Type and number of elements of its tensor, such as `f32[12]`: backends do not look at the shape."""

        def size(shape: re.Match[str]) -> str:
            return f"[{math.prod(int(number) for number in shape[1].split(',') if number)}]"

        return re.sub(r"\[([\d,]*)\]", size, self.tensor_text)


@dataclass(frozen=True, kw_only=True)
class StackSummary:
    """What a stack shows.

    Args:
        script: The frames of the script, innermost first.
        torch_call: The function of torch.distributed or Paceline that the script called, and in which it
            waits for other ranks, such as `recv` or `paceline's evaluate`; empty if there is none.
        waits: Whether its innermost frame is there, so it does nothing else, such as pickle an object.
        reduce_scatter: Whether it is in a reduce_scatter.
        gradients: Whether it is in a backward.
        loader: Whether it waits for the workers of a DataLoader.
        lock: Whether it waits for a lock, a queue or a process.
        serves: Whether it is a server that waits for requests.
    """

    script: tuple[Frame, ...] = ()
    torch_call: str = ""
    waits: bool = False
    reduce_scatter: bool = False
    gradients: bool = False
    loader: bool = False
    lock: bool = False
    serves: bool = False

    @property
    def in_paceline(self) -> bool:
        """Whether `torch_call` is Paceline's."""
        return self.torch_call.startswith(_OURS)

    @property
    def line(self) -> str:
        """`file:line` of the innermost frame of the script; empty if there is none."""
        return "{}:{}".format(*self.script[0][:2]) if self.script else ""

    @property
    def function_at_line(self) -> str:
        """`function() at file:line` of that frame; `at file:line` outside of functions."""
        if not self.script:
            return ""
        function = self.script[0][2]
        return f"at {self.line}" if function == "<module>" else f"{function}() at {self.line}"


@dataclass(frozen=True, kw_only=True)
class RankState:
    """The state of one rank.

    Args:
        state: The state of its process, as in /proc; empty if it has ended.
        returncode: None while it runs.
        idle_s: Seconds since it last entered or left a collective.
        holds_gil: Whether native code holds the GIL, so that the rank cannot answer.
        in_unreported_collective: Whether it is in a collective that it did not report.
        answered: Whether it reported where it is; otherwise `where` is from its last beat.
        raised: The errors that the script handles, in lines, the latest first: type, message and place.
        in_step: Whether it is in a forward in training mode, in a backward, or in an optimizer.
        optimizer_steps: How many calls of optimizer.step() have ended, of all optimizers together.
        step: Its training step; 0 if unknown.
        stage: Its stage of a pipeline; None without one.
        call: The function that its innermost line of the script calls.
        peer: The rank that it sends to or receives from.
        calls: Collectives, oldest first: the latest, and all that are not completed.
        last_numbers: By `Call.group_and_backend`, the number of the latest collective that it entered.
        workers: A few words for each child process that may be a loader worker.
        kernel_function: The kernel's function that it waits in.
    """

    rank: int
    host: str
    pid: int
    state: str = "S"
    returncode: int | None = None
    idle_s: float = 0.0
    holds_gil: bool = False
    in_unreported_collective: bool = False
    answered: bool = True
    raised: str = ""
    in_step: bool = False
    optimizer_steps: int = 0
    step: int = 0
    stage: int | None = None
    where: StackSummary = StackSummary()
    call: str = ""
    peer: int | None = None
    calls: tuple[Call, ...] = ()
    last_numbers: Mapping[str, int] = field(default_factory=dict)
    workers: tuple[str, ...] = ()
    kernel_function: str = ""

    def has_entered(self, call: Call) -> bool:
        """Whether it has entered this collective of another rank."""
        return self.last_numbers.get(call.group_and_backend, 0) >= call.number

    @property
    def open_call(self) -> Call | None:
        """The oldest collective that is not completed."""
        return next((call for call in self.calls if not call.completed), None)

    @property
    def waits_for_ranks(self) -> bool:
        """Whether its main thread provably waits for other ranks.

        An open collective alone does not prove it: with `async_op=True` and on a GPU, the script goes on.
        """
        if self.returncode is not None or self.state in (*HELD, "D", "Z"):
            return False
        if self.where.torch_call:
            return self.where.waits or self.open_call is not None
        waits = self.where.gradients or self.call.rpartition(".")[2] == "wait"
        return waits and self.open_call is not None

    @property
    def may_come(self) -> bool:
        """Whether a rank that does not wait for ranks may go on by itself."""
        return self.returncode is None and self.state != "T"


def read_calls(
    entries: Sequence[Mapping[str, Any]],
    groups: Mapping[str, Sequence[int]],
    now: float,
    axes: Mapping[str, str] | None = None,
) -> tuple[Call, ...]:
    """The collectives in entries of `flight_recorder.table`, without sends and receives.

    Args:
        groups: The ranks of each group by its name.
        now: Seconds since the epoch.
        axes: The axis of a device mesh of each group that is on one.
    """
    return tuple(
        Call(
            name=entry["profiling_name"].rpartition(":")[2].strip("_").removesuffix("_base"),
            number=entry["collective_seq_id"],
            group=entry["group"],
            backend=entry["backend"],
            members=tuple(groups.get(entry["group"], ())),
            axis=(axes or {}).get(entry["group"], ""),
            tensor_text=_tensor_text(entry["input_dtypes"], entry["input_sizes"]),
            since_s=max(now - entry["time_created_ns"] / 1e9, 0.0),
            completed=bool(entry["retired"]) or entry.get("state") == "completed",
        )
        for entry in entries
        if not entry.get("is_p2p")
    )


def last_call(answer: Mapping[str, Any], place: str) -> str:
    """The collective that a rank entered last, and its line, from its answer; empty if it has none.

    Args:
        place: The line where the rank ended; empty if it runs.
    """
    try:
        calls = read_calls(answer.get("entries", ()), answer.get("groups", {}), 0.0)
        if not calls:
            return ""
        place = place or read_stack(answer["threads"][0]["stack"], "").line
        at = f" at {place}" if place else ""
        return f"{calls[-1].name} #{calls[-1].number} ({calls[-1].tensor_text}){at}"
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return ""  # the script wrote into the launcher's socket


def _tensor_text(dtypes: Sequence[str], sizes: Sequence[Sequence[int]]) -> str:
    if not dtypes:
        return ""
    dtype = _DTYPES.get(dtypes[0], dtypes[0])
    dtype = re.sub(r"^(b?)(float|int|uint)(?=\d)", lambda m: m[1] + m[2][0], dtype)
    more = f" and {len(sizes) - 1} more" if len(sizes) > 1 else ""
    return f"{dtype}[{','.join(map(str, sizes[0]))}]{more}"


def read_stack(stack: Sequence[Sequence[Any]], cwd: str) -> StackSummary:
    """Parse frames, innermost first. Files under `cwd` become relative."""
    inner: list[str] = []
    torch_call, is_waiting, waits = "", False, False
    frames = frames_of_script([(file, line, function) for file, line, function in stack])
    for file, line, function in stack:
        if frames and (file, line, function) == frames[0]:
            break
        here = any(name in file for name in _WAITS) and function not in _PICKLES
        waits = waits or (here and all(one.endswith(_BLOCKS) for one in inner))
        inner.append(file)
        is_waiting = is_waiting or here
        if is_waiting and function not in _DECORATORS:
            if "torch/distributed/" in file:
                torch_call = function.strip("_")
            elif "paceline/" in file and not function.startswith(("_", "<")):
                torch_call = _OURS + function
    script = tuple(
        (file.removeprefix(cwd.rstrip("/") + "/"), line, function)
        for file, line, function in frames
    )
    return StackSummary(
        script=script,
        torch_call=torch_call,
        waits=waits,
        reduce_scatter=any(
            "torch/distributed/" in file and "reduce_scatter" in function
            for file, _, function in stack[: len(inner)]
        ),
        gradients=any("torch/autograd/" in file for file in inner),
        loader=any(file.endswith(_LOADERS) for file in inner),
        lock=any(file.endswith(_LOCKS) for file in inner),
        serves=any(file.endswith(_SERVERS) for file in inner),
    )


def read_dump(text: str) -> list[Frame]:
    """The frames of the main thread in the text of faulthandler, which writes it last.

    Empty if there are so many threads (100) that it left out the main one.
    """
    if text.rstrip().endswith("\n..."):
        return []
    last = text.rpartition("\nThread ")[2] or text
    return [(m[1], int(m[2]), m[3]) for m in map(_FRAME.fullmatch, last.splitlines()) if m]


def read_place(place: str, cwd: str) -> StackSummary:
    """Parse `file:line in function` of a beat."""
    found = re.fullmatch(r"(.*):(\d+) in (.*)", place)
    if found is None:
        return StackSummary()
    return read_stack([(found[1], int(found[2]), found[3])], cwd)


def read_beat(text: str) -> dict[str, Any]:
    """Parse the line of a probe; empty if there is none."""
    try:
        beat: dict[str, Any] = json.loads(text.partition("\n")[0])
    except ValueError:
        return {}  # not written yet, or being written
    return beat
