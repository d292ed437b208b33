"""The command line of `paceline run`: torchrun's options and our own.

This file does not import torch, so that the ranks of one host start before the launcher imports it. A test
compares the names with the installed torch. Variables `PET_*` give defaults, as for torchrun.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import re
import shutil
import socket
import sys
import uuid
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any

from paceline.command_line import CommandParser
from paceline.errors import ConfigError, count_of
from paceline.exit_codes import ExitCode
from paceline.job import slurm
from paceline.job.preemption import GRACE_VARIABLE
from paceline.launch.local_ranks import WORKER, has_probe
from paceline.launch.signals import DEFAULT_SIGNALS, parse_signals

_GRACE_S = 5.0
_SAVE_GRACE_S = 30.0
_STATIC_PORT = 29500
_C10D_PORT = 29400
_LOOPBACK = "127.0.0.1"
_NPROC_ALIASES = ("-n", "--nproc", "--nprocs", "--num-processes", "--num_processes")
# What --rdzv-conf may have. The last two are the timeouts of torchrun, which have no effect here.
_CONFIGURES: dict[str, Any] = {
    "join_timeout": float,
    "last_call_timeout": float,
    "keep_alive_interval": float,
    "keep_alive_max_attempt": int,
    "is_host": str,
    "timeout": None,
    "read_timeout": None,
}
_WHAT = "0 none, 1 stdout, 2 stderr, 3 both; or for single local ranks, as 0:1,1:2"
# Name, type (or choices), default and help of each option: those of Paceline, and those of torchrun by group.
_OWN: tuple[tuple[str, Any, Any, str], ...] = (
    (
        "--host",
        str,
        None,
        "HOST[:PORT] of the rendezvous, the same on all of them; short for --rdzv-backend c10d "
        f"--rdzv-endpoint HOST:PORT (default port: {_C10D_PORT}). The node "
        "with --node-rank 0, or else the one that has the address, serves it",
    ),
    (
        "--hang-after",
        float,
        None,
        "seconds that the ranks may make no progress before a hang is reported (default: 10, or ten times "
        "the usual time between two collectives, if that is longer); 0 switches it off",
    ),
    (
        "--on-hang",
        ("report", "end"),
        "report",
        "whether a hang is only reported or also ends the ranks, as a failure does; `end` needs "
        "--hang-after (default: report)",
    ),
    (
        "--recover",
        ("restart", "in-place"),
        "restart",
        "what follows a failure while restarts are left: all ranks start again; or a new process takes the "
        "place of the rank that failed, and the others keep theirs, if the training can do that (default: "
        "restart)",
    ),
    (
        "--dry-run",
        str,
        None,
        "N or N:RANK: run two steps as one rank of N in this one process, without the others, and print what "
        "the rank holds; for scripts that call paceline.join",
    ),
)
_GROUPS = {
    "--hang-after": "hangs",
    "--on-hang": "hangs",
    "--dry-run": "ranks",
    "--recover": "ranks",
}
_TORCHRUN: dict[str, tuple[tuple[str, type, Any, str], ...]] = {
    "ranks": (
        (
            "--nproc-per-node",
            str,
            "1",
            "ranks on this node: a number, `gpu` or `xpu` (one for each device), `cpu` (one for each core), "
            "or `auto` (default: 1)",
        ),
        ("--max-restarts", int, 0, "how often the ranks start again after a failure (default: 0)"),
        ("-m --module", bool, False, "SCRIPT is a module, as in `python -m`"),
        ("--no-python", bool, False, "SCRIPT is a program"),
        ("--run-path", bool, False, "SCRIPT is a file; overrides the last two"),
        ("--virtual-local-rank", bool, False, "LOCAL_RANK is 0, and a rank sees its own GPU only"),
        (
            "--shutdown-timeout",
            int,
            None,
            "seconds that ranks may take to end after SIGTERM before they are killed (default: "
            f"{_GRACE_S:.0f} after a failure, else {GRACE_VARIABLE} or {_SAVE_GRACE_S:.0f})",
        ),
        ("--signals-to-handle", str, DEFAULT_SIGNALS, "signals that end the job"),
        ("--monitor-interval", str, "", "of torchrun; no effect: the launcher reacts at once"),
        ("--role", str, "default", "the value of ROLE_NAME"),
    ),
    "hosts": (
        ("--nnodes", str, "1:1", "how many nodes the job has, or MIN:MAX (default: 1)"),
        ("--node-rank", int, None, "the number of this node, from 0"),
        ("--rdzv-backend", str, "static", "c10d, or static: node 0 serves --master-addr"),
        ("--rdzv-endpoint", str, "", "HOST:PORT of the rendezvous"),
        ("--rdzv-id", str, "none", "the name of the job"),
        ("--rdzv-conf", str, "", f"KEY=VALUE,... of {', '.join(_CONFIGURES)}"),
        ("--standalone", bool, False, "one node; no other option of this group counts"),
        ("--master-addr", str, _LOOPBACK, "host of static rendezvous"),
        ("--master-port", int, None, f"its port (default: {_STATIC_PORT}; one node: any)"),
        ("--local-addr", str, None, "the address at which other nodes reach this one"),
    ),
    "output": (
        ("--log-dir", str, None, "folder for log files, and for reports of failures"),
        ("-r --redirects", str, "0", f"write to log files only: {_WHAT}"),
        ("-t --tee", str, "0", "write to log files too; as --redirects"),
        ("--local-ranks-filter", str, "", "show the output of these local ranks only, as 0,1"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The rendezvous endpoint of several nodes.

    Attributes:
        host: Name or address.
        is_host: Whether this node has to serve the store; None: if it owns the address.
        one_launcher: Whether each host has one launcher only. Then a port that is taken is an error;
            otherwise the launcher that took it serves the store for this one too.
    """

    host: str
    port: int
    is_host: bool | None
    one_launcher: bool

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class RendezvousOptions:
    """Of `--rdzv-conf`.

    Attributes:
        join_timeout_s: How long to wait for nodes.
        last_call_timeout_s: How long the first round waits for more nodes when there are enough.
        keep_alive_interval_s: Between two heartbeats; None for the default.
        keep_alive_max_attempt: A node without so many heartbeats is dead; None for the default.
    """

    join_timeout_s: float = 600.0
    last_call_timeout_s: float = 30.0
    keep_alive_interval_s: float | None = None
    keep_alive_max_attempt: int | None = None


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """A parsed command line.

    Args:
        args: As argparse returns them.
        nproc: Number of ranks on this node.
        endpoint: Of the rendezvous; None for one node.
        address: Where one node binds its store.
        node_rank: The number that the user gave this node; None if there is none.
        notes: Printed at the start, one sentence each.
    """

    args: Namespace
    nproc: int
    min_nodes: int
    max_nodes: int
    run_id: str
    endpoint: Endpoint | None
    address: tuple[str, int]
    node_rank: int | None
    rendezvous: RendezvousOptions
    notes: tuple[str, ...]

    @property
    def script(self) -> str:
        """The script, module or program that the ranks run."""
        return str(self.args.training_script)

    @property
    def is_python(self) -> bool:
        """Whether the ranks run a Python script."""
        return not self.args.no_python

    @property
    def uses_logs(self) -> bool:
        """Whether torch's log options were given. --log-dir alone is the folder for reports of failures."""
        return bool(self.args.redirects != "0" or self.args.tee != "0")

    def command_of(self, local_rank: int) -> tuple[str, ...]:
        """The command of a rank, in which `${local_rank}` is replaced as torchrun does."""
        words = [self.script, *self.args.training_script_args]
        words = [Template(word).safe_substitute(local_rank=local_rank) for word in words]
        if not self.is_python:
            return tuple(words)
        python = os.environ.get("PYTHON_EXEC", sys.executable)  # as torchrun
        return (python, "-u", str(WORKER), *(["-m"] if self.args.module else []), *words)

    def grace_s(self, *, may_save: bool) -> float:
        """Seconds for ranks to end; longer if a training may save a checkpoint before."""
        if self.args.shutdown_timeout is not None:
            return float(self.args.shutdown_timeout)
        longest_s = float(os.environ.get(GRACE_VARIABLE, _SAVE_GRACE_S))
        # After a failure nothing is saved, and a rank that hangs must not delay the restart.
        return longest_s if may_save else min(longest_s, _GRACE_S)

    @property
    def shown_local_ranks(self) -> frozenset[int] | None:
        """Local ranks whose output is shown; None for all."""
        text = self.args.local_ranks_filter
        return frozenset(int(part) for part in text.split(",")) if text else None

    @property
    def nnodes(self) -> str:
        """How many nodes the job may have: a number, or `MIN:MAX`."""
        low, high = self.min_nodes, self.max_nodes
        return str(low) if low == high else f"{low}:{high}"


def parser() -> CommandParser:
    """Our options, and those of torchrun."""
    ours = CommandParser(
        "paceline run",
        usage="paceline run [options] SCRIPT [args ...]",
        description="Run a training script on several processes, with the options of torchrun. Each may "
        "also be given by a variable such as PET_NPROC_PER_NODE.",
        examples={
            "paceline run --nproc-per-node 2 train.py --lr 0.1": "two ranks on this host; --lr is the "
            "script's",
            "paceline run --nproc-per-node gpu train.py": "one rank for each GPU",
            "paceline run --nproc-per-node 2 -m package.train": "a module instead of a file",
            "paceline run --nnodes 2 --host 10.0.0.1 train.py": "two nodes, of which one has this address; "
            "start it on both",
            "paceline run --nproc-per-node 2 --max-restarts 3 train.py": "start the ranks again after a "
            "failure, at most three times; with --hang-after 600 --on-hang end also after a hang",
            "paceline run --dry-run 64 --nproc-per-node 8 train.py": "two steps of rank 0 of 64, with 8 on "
            "each host: check the layout, and see the memory that a rank needs",
        },
        exit_codes={
            ExitCode.OK: "all ranks ended well",
            ExitCode.FAILED: "a rank raised an exception, ended before the others, or blocked them with "
            "--on-hang end",
            ExitCode.USAGE: "the command line is wrong",
            ExitCode.UNAVAILABLE: "the rendezvous was lost: start the job again",
            ExitCode.RANKS_DIFFER: "ranks disagree, or replicas drifted apart",
            ExitCode.SAVE_FAILED: "the last save failed",
            ExitCode.PREEMPTED: "preempted: start the job again",
            ExitCode.INTERRUPTED: "interrupted with Ctrl-C",
            "128 + n": "a rank was killed by signal n, or the launcher received it",
            "other": "that of the rank that failed first",
        },
    )
    ours.add_argument("training_script", metavar="SCRIPT", help="the training script")
    ours.add_argument(
        "training_script_args", nargs="...", metavar="ARGUMENTS", help="its arguments"
    )
    groups = {name: ours.add_argument_group(name) for name in ("hangs", "hosts", "ranks", "output")}
    for name, kind, default, text in _OWN:
        group = groups[_GROUPS.get(name, "hosts")]
        choices = kind if isinstance(kind, tuple) else None
        group.add_argument(
            name, type=str if choices else kind, choices=choices, default=default, help=text
        )
    for group_name, options in _TORCHRUN.items():
        for name, kind, default, text in options:
            _add(groups[group_name], name, kind, default, text)
    groups["ranks"].add_argument(
        *_NPROC_ALIASES, dest="nproc_per_node", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )
    return ours


def _add(group: Any, names: str, kind: type, default: Any, text: str) -> None:
    """Add an option of torchrun, with underscores too, and with its variable `PET_*`."""
    words = names.split()
    option = words[-1].removeprefix("--")
    dest = option.replace("-", "_")
    variable = os.environ.get(f"PET_{dest.upper()}")
    spelled = dict.fromkeys([*words, f"--{dest}"])
    if kind is bool:
        is_set = variable not in (None, "", "0")
        group.add_argument(*spelled, action="store_true", default=is_set, help=text)
    else:
        default = default if variable is None else variable
        group.add_argument(*spelled, type=kind, default=default, help=text)


def read_options(argv: Sequence[str]) -> LaunchOptions:
    """Parse a command line.

    Raises:
        ConfigError: a wrong value.
        SystemExit: by the parser, for an unknown option or --help.
    """
    ours = parser()
    own, script_args = ours.split_at_script(argv)
    args = ours.parse_args(own)
    args.training_script_args = script_args
    if args.run_path:  # in torch it overrides the other two
        args.module = args.no_python = False
    notes: list[str] = []
    nproc = _check(args)
    node_rank = args.node_rank
    if not args.standalone:
        node_rank = _apply_slurm(args, os.environ, node_rank, notes)
    low, high = _nodes(args.nnodes)
    configured = _read_configuration(args.rdzv_conf)
    endpoint, address = None, (_LOOPBACK, 0)
    if high == 1 or args.standalone:
        address = _own_address(args, high, notes)
    else:
        _check_node_rank(node_rank, high)
        endpoint = _endpoint(args, node_rank, configured.pop("is_host", None))
    for word in args.training_script_args:
        name = word.partition("=")[0].replace("_", "-")
        if name in ("--nproc-per-node", "--nnodes", "--max-restarts"):
            notes.append(
                f"{name} after the script is given to the script; the launcher's options come first"
            )
    if args.recover == "in-place" and (high > 1 or args.no_python or not args.max_restarts):
        raise ConfigError(
            "--recover in-place is for Python scripts on one node, with --max-restarts.",
            why="a process that is replaced counts as a restart, and other nodes do not take part.",
            fix="give --max-restarts 3 on one node, or leave --recover out.",
        )
    run_id = args.rdzv_id
    if run_id == "none" and endpoint is None:
        run_id = str(uuid.uuid4())
    configured.pop("is_host", None)
    return LaunchOptions(
        args=args,
        nproc=nproc,
        min_nodes=low,
        max_nodes=high,
        run_id=run_id,
        endpoint=endpoint,
        address=address,
        node_rank=node_rank if node_rank is not None or args.rdzv_backend != "static" else 0,
        rendezvous=RendezvousOptions(**configured),
        notes=tuple(notes),
    )


def _nodes(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text, re.ASCII)
    if found is None:
        raise ConfigError(f"--nnodes must be a number or MIN:MAX, and is {text!r}.")
    low, high = int(found[1]), int(found[2] or found[1])
    if not 1 <= low <= high:
        raise ConfigError(
            f"--nnodes must be 1 or more, and is {text}.",
            fix="give the number of nodes, or MIN:MAX.",
        )
    return low, high


def _read_configuration(text: str) -> dict[str, Any]:
    """The fields of `RendezvousOptions` in `--rdzv-conf`, and `is_host`."""
    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in _CONFIGURES:
            known = ", ".join(_CONFIGURES)
            raise ConfigError(f"--rdzv-conf has no {key!r}.", fix=f"it may have: {known}.")
        kind = _CONFIGURES[key]
        if key == "is_host":
            found[key] = value.lower() in ("1", "true", "t", "yes", "y")
        elif kind is not None:
            number: float = 0
            with contextlib.suppress(ValueError):
                number = kind(value)
            if not 0 < number < float("inf"):
                raise ConfigError(
                    f"--rdzv-conf {key} must be a positive number, got {value}.",
                    fix=f"give a positive number, or leave out {key}.",
                )
            found[key if key == "keep_alive_max_attempt" else f"{key}_s"] = number
    return found


def _apply_slurm(
    args: Namespace, environ: Mapping[str, str], node_rank: int | None, notes: list[str]
) -> int | None:
    """Take nodes, node rank and host from the Slurm step, unless they were given; returns the node rank."""
    step = slurm.read_node(environ)
    given = args.host or args.rdzv_endpoint or args.rdzv_backend != "static" or args.nnodes != "1:1"
    if step is None:
        if not given and (idle := slurm.unused_nodes(environ)):
            notes.append(
                f"{count_of(idle, 'node')} of this Slurm job {'is' if idle == 1 else 'are'} not used: to use "
                "all, write `srun --ntasks-per-node=1` before `paceline run`"
            )
        return node_rank
    nodes = len(step.tasks)
    if given or nodes == 1:
        return node_rank
    args.nnodes, args.host = str(nodes), step.endpoint
    if args.rdzv_id == "none":
        args.rdzv_id = step.key  # so that two jobs whose ports are equal never mix
    notes.append(f"Slurm step of {nodes} nodes: --nnodes={nodes} --host={args.host}")
    return step.node_rank if node_rank is None else node_rank


def _check_node_rank(node_rank: int | None, nodes: int) -> None:
    if node_rank is None or 0 <= node_rank < nodes:
        return
    there = "is 1 node" if nodes == 1 else f"are {nodes} nodes"
    raise ConfigError(
        f"--node-rank is {node_rank}, and there {there}.",
        why="nodes are numbered from 0, and the others would wait for the node of the missing number.",
        fix=f"give a --node-rank from 0 to {nodes - 1}."
        if nodes > 1
        else "give --nnodes, or leave it out.",
    )


def _own_address(args: Namespace, nodes: int, notes: list[str]) -> tuple[str, int]:
    """Where a single node binds its store."""
    if args.standalone:
        if nodes != 1:
            raise ConfigError(
                f"--standalone is for one node, and --nnodes is {args.nnodes}.",
                fix="leave one of them out.",
            )
        if args.rdzv_endpoint or args.rdzv_backend != "static" or args.master_port is not None:
            notes.append("--standalone: the rendezvous options and --master-port are not used")
        return args.local_addr or _LOOPBACK, 0
    _check_node_rank(args.node_rank, nodes)
    host, port, is_named = _rendezvous_endpoint(args)
    if not is_named:
        host = args.local_addr or host
    if port is None:
        port = _C10D_PORT if is_named else 0
    return _LOOPBACK if host == "localhost" else host, port


def _endpoint(args: Namespace, node_rank: int | None, is_host: bool | None) -> Endpoint:
    """The rendezvous endpoint of several nodes."""
    host, port, is_named = _rendezvous_endpoint(args)
    if args.rdzv_backend == "static":
        node_rank = node_rank or 0  # torchrun's default
    default = _C10D_PORT if is_named or args.rdzv_backend != "static" else _STATIC_PORT
    if is_host is None and node_rank is not None:
        is_host = node_rank == 0
    return Endpoint(
        host=host, port=port or default, is_host=is_host, one_launcher=args.host is not None
    )


def _rendezvous_endpoint(args: Namespace) -> tuple[str, int | None, bool]:
    """Host, port if it is given, and whether --host or --rdzv-endpoint names them."""
    _check_host(args)
    if args.host is not None:
        return *_host_and_port("--host", args.host), True
    if args.rdzv_endpoint.strip():
        return *_host_and_port("--rdzv-endpoint", args.rdzv_endpoint.strip()), True
    if args.rdzv_backend == "static":
        return args.master_addr.strip("[]"), args.master_port, False
    return "localhost", None, False


def _check_host(args: Namespace) -> None:
    """Refuse --host beside --rdzv-endpoint, and unknown backends."""
    if args.host is None:
        if args.rdzv_backend not in ("static", "c10d"):
            raise ConfigError(
                f"--rdzv-backend={args.rdzv_backend} cannot be used here.",
                why="the rendezvous is a store that one of the launchers serves.",
                fix="give --host with the address of a node, or --rdzv-backend=c10d.",
            )
        return
    if args.rdzv_endpoint:
        raise ConfigError(
            "--host and --rdzv-endpoint contradict each other.", fix="leave one of them out."
        )
    args.rdzv_backend = "c10d"


def _host_and_port(name: str, text: str) -> tuple[str, int | None]:
    """The host that an option names, and its port if there is one."""
    host, port = text, None
    if found := re.fullmatch(r"(\[.+\]|[^:]*):(\d+)", text, re.ASCII):
        host, port = found[1], int(found[2])
    with contextlib.suppress(ValueError):
        host = f"[{ipaddress.IPv6Address(host.strip('[]'))}]"
    if not re.fullmatch(r"\[.*:.*\]|[\w.-]+", host) or not (port or 0) < 1 << 16:
        raise ConfigError(
            f"{name} is {text!r}, which is not a host name or address.",
            fix="give HOST or HOST:PORT, such as 10.0.0.1, node0:29400 or [fd00::1]:29400.",
        )
    return host.strip("[]"), port


def _count_ranks(word: str) -> int:
    if re.fullmatch(r"-?\d+", word, re.ASCII):
        count = int(word)
    elif word == "cpu":
        count = os.cpu_count() or 1
    else:
        count = _count_devices(word)
    if count < 1:
        raise ConfigError(
            f"--nproc-per-node must be at least 1, and is {count}.",
            fix="give the number of processes on this node, or `gpu`, or `cpu`.",
        )
    return count


def _count_devices(word: str) -> int:
    import torch
    from torch.distributed.run import determine_local_world_size

    try:
        return int(determine_local_world_size(word))
    except (ValueError, AssertionError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"--nproc-per-node={word} cannot be used here: {error}",
            where=f"host {socket.gethostname()}, torch {torch.__version__}",
            fix="give the number of ranks on this node, `gpu`, `xpu`, `cpu` or `auto`. If it has GPUs that "
            "torch does not find, run `paceline doctor`.",
        ) from error


def _check(args: Namespace) -> int:
    """Refuse wrong values; returns the number of ranks."""
    nproc = _count_ranks(args.nproc_per_node)
    _check_hangs(args)
    if args.max_restarts < 0:
        raise ConfigError(f"--max-restarts must be 0 or more, and is {args.max_restarts}.")
    if not re.fullmatch(r"(\d+(,\d+)*)?", args.local_ranks_filter, re.ASCII):
        raise ConfigError(
            f"--local-ranks-filter must be numbers, and is {args.local_ranks_filter!r}.",
            fix="give local ranks, such as 0,1.",
        )
    for name, value in (("--redirects", args.redirects), ("--tee", args.tee)):
        if not re.fullmatch(r"[0-3]|\d:[0-3](,\d:[0-3])*", value, re.ASCII):  # as torch reads it
            raise ConfigError(f"{name} is {value!r}.", fix=f"give {_WHAT}.")
    try:
        parse_signals(args.signals_to_handle)
    except ValueError as error:
        raise ConfigError(f"--signals-to-handle: {error}.") from error
    for name, timeout in (
        ("--shutdown-timeout", args.shutdown_timeout),
        (GRACE_VARIABLE, os.environ.get(GRACE_VARIABLE)),
    ):
        if timeout is not None and not str(timeout).isdecimal():
            raise ConfigError(
                f"{name} must be a whole number of seconds, and is {timeout!r}.",
                fix="give a number from 0 on, or leave it out.",
            )
    if args.no_python and args.module:
        raise ConfigError("--no-python and --module contradict each other.")
    if args.no_python and shutil.which(args.training_script) is None:
        raise ConfigError(
            f"there is no program {args.training_script!r}.",
            fix="with --no-python, give the path of an executable file, or a name that is on PATH.",
        )
    return nproc


def _check_hangs(args: Namespace) -> None:
    if args.hang_after is not None and not 0 <= args.hang_after < float("inf"):
        raise ConfigError(
            f"--hang-after must be a number of seconds, or 0 to switch it off; it is {args.hang_after}."
        )
    if not args.hang_after and args.on_hang == "end":
        raise ConfigError(
            "--on-hang=end needs --hang-after with the seconds after which a hang ends the ranks.",
            fix="add, for example, --hang-after=600.",
        )
    given = "--hang-after" if args.hang_after is not None else "--on-hang=end"
    if (args.no_python or not has_probe()) and (
        args.hang_after is not None or args.on_hang == "end"
    ):
        raise ConfigError(
            f"{given} has no effect with --no-python or PACELINE_PROBE=0.",
            why="a thread in each rank reports what the rank does.",
            fix="leave one of them out.",
        )
