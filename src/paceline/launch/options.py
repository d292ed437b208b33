"""torchrun's options, parsed by the installed torch.

Uses the parser of `torch.distributed.run`. An option takes effect, or is refused with a reason; if torch
itself ignores it, a note says so.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import shutil
import socket
import sys
import uuid
from argparse import SUPPRESS, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.elastic.utils import macros
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import (
    config_from_args,
    determine_local_world_size,
    get_args_parser,
    parse_min_max_nnodes,
)

from paceline.command_line import CommandParser
from paceline.errors import ConfigError
from paceline.exit_codes import ExitCode
from paceline.job import slurm
from paceline.job.network import is_loopback
from paceline.launch.endpoint import Endpoint
from paceline.launch.local_ranks import WORKER, count_of, has_probe
from paceline.launch.rendezvous import C10D_PORT

# What other launchers call --nproc-per-node.
_NPROC_ALIASES = ("-n", "--nproc", "--nprocs", "--num-processes", "--num_processes")
_GRACE_S = 5.0
_SAVE_GRACE_S = 30.0
_SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_DEFAULT_PORT = 29500


@dataclass(frozen=True)
class LaunchOptions:
    """A parsed command line.

    Args:
        args: From torch's parser.
        config: For torch's launcher.
        address: Where to bind the store of a single node; None if torch's rendezvous serves the store.
        node_rank: The number that the user gave this node; None if there is none.
        ports: First and last port that the launcher may listen on; None: the kernel chooses.
        uses_logs: Whether torch's log options were given.
        notes: Printed at the start, one sentence each.
    """

    args: Namespace
    config: LaunchConfig
    address: tuple[str, int] | None
    node_rank: int | None
    ports: tuple[int, int] | None
    uses_logs: bool
    notes: tuple[str, ...]

    @property
    def is_python(self) -> bool:
        """Whether the ranks run a Python script."""
        return not self.args.no_python

    def command_of(self, local_rank: int) -> tuple[str, ...]:
        """The command of a rank."""
        script = self.args.training_script
        words = macros.substitute([script, *self.args.training_script_args], str(local_rank))
        if not self.is_python:
            return tuple(words)
        python = os.environ.get("PYTHON_EXEC", sys.executable)  # as torchrun
        return (python, "-u", str(WORKER), *(["-m"] if self.args.module else []), *words)

    def grace_s(self, *, may_save: bool) -> float:
        """Seconds for ranks to end; longer if a training may save a checkpoint before."""
        if self.args.shutdown_timeout is not None:
            return float(self.args.shutdown_timeout)
        longest_s = float(os.environ.get(_SHUTDOWN_VARIABLE, _SAVE_GRACE_S))
        # After a failure nothing is saved, and a rank that hangs must not delay the restart.
        return longest_s if may_save else min(longest_s, _GRACE_S)

    @property
    def shown_local_ranks(self) -> frozenset[int] | None:
        """Local ranks whose output is shown; None for all."""
        text = self.args.local_ranks_filter
        return frozenset(int(part) for part in text.split(",")) if text else None

    @property
    def endpoint(self) -> Endpoint | None:
        """Where the nodes meet; None if that is no address of one host, as with etcd."""
        if self.address is not None:
            host, port = self.address
        elif self.config.rdzv_backend in ("c10d", "static"):
            host, port = parse_rendezvous_endpoint(self.config.rdzv_endpoint, C10D_PORT)
        else:
            return None
        serves = self.config.rdzv_configs.get("is_host")
        if serves is not None:
            is_host: bool | None = str(serves).lower() in ("1", "true", "t", "yes", "y")
        else:
            is_host = None if self.node_rank is None else self.node_rank == 0
        return Endpoint(
            host=host, port=port, is_host=is_host, one_launcher=self.args.host is not None
        )

    @property
    def nnodes(self) -> str:
        """How many nodes the job may have: a number, or `MIN:MAX`."""
        low, high = self.config.min_nodes, self.config.max_nodes
        return str(low) if low == high else f"{low}:{high}"

    @property
    def waiting_message(self) -> str:
        """How many nodes this one waits for, and where; empty if the job has one node."""
        if self.address is not None:
            return ""
        low, high = self.config.min_nodes, self.config.max_nodes
        nodes = count_of(high, "node") if low == high else f"{low} to {high} nodes"
        endpoint = self.config.rdzv_endpoint
        where = self.endpoint
        if where is None:
            return f"waiting for {nodes} at {endpoint}"
        note = " (only this host can reach it; set another host with --host)"
        return f"waiting for {nodes} at {where}{note if is_loopback(where.host) else ''}"


def parser() -> CommandParser:
    """The options of torch's parser and our own."""
    ours = CommandParser(
        "paceline run",
        usage="paceline run [options] SCRIPT [args ...]",
        description="Run a training script on several processes. The options are those of torchrun in the "
        "installed torch; --duplicate-stdout-filters, --duplicate-stderr-filters and a --start-method "
        "other than spawn are refused.",
        examples={
            "paceline run --nproc-per-node 2 train.py --lr 0.1": "two ranks on this host; --lr is the "
            "script's",
            "paceline run --nproc-per-node gpu train.py": "one rank for each GPU",
            "paceline run --nproc-per-node 2 -m package.train": "a module instead of a file",
            "paceline run --nnodes 2 --host 10.0.0.1 train.py": "two nodes, of which one has this address; "
            "start it on both",
            "paceline run --nproc-per-node 2 --max-restarts 3 train.py": "start the ranks again after a "
            "failure, at most three times; with --hang-after 600 --on-hang end also after a hang",
        },
        exit_codes={
            ExitCode.OK: "all ranks ended well",
            ExitCode.FAILED: "a rank raised an exception, ended before the others, or blocked them with "
            "--on-hang end; or the script is not valid Python",
            ExitCode.USAGE: "the command line is wrong",
            ExitCode.UNAVAILABLE: "the rendezvous was lost: start the job again",
            ExitCode.RANKS_DIFFER: "ranks disagree, or replicas drifted apart",
            ExitCode.SAVE_FAILED: "the last save failed",
            ExitCode.PREEMPTED: "preempted: start the job again",
            ExitCode.INTERRUPTED: "interrupted with Ctrl-C",
            "128 + n": "a rank was killed by signal n, or the launcher received it",
            "other": "that of the rank that failed first",
        },
        parents=[get_args_parser()],
        add_help=False,  # torch's parser brings it
    )
    for argument in ours.arguments:
        if argument.dest == "training_script":
            argument.metavar, argument.help = "SCRIPT", "the training script"
        elif argument.dest == "training_script_args":
            argument.metavar, argument.help = "ARGUMENTS", "the script's own arguments"
            argument.required = False
    ours.add_argument(
        *_NPROC_ALIASES, dest="nproc_per_node", default=SUPPRESS, help=SUPPRESS, metavar="N"
    )
    hosts = ours.add_argument_group("several hosts")
    hosts.add_argument(
        "--host",
        metavar="HOST[:PORT]",
        help="the host at which the nodes meet, the same on all of them; short for --rdzv-backend c10d "
        f"--rdzv-endpoint HOST:PORT (default port: {C10D_PORT}, or the first of --port-range). The node with "
        "--node-rank 0, or else the one that has the address, serves it",
    )
    hosts.add_argument(
        "--port-range",
        metavar="FIRST-LAST",
        help="the ports that the launchers may listen on, for firewalls; Gloo and NCCL take theirs from the "
        "kernel's net.ipv4.ip_local_port_range",
    )
    hangs = ours.add_argument_group("hangs")
    hangs.add_argument(
        "--hang-after",
        type=float,
        metavar="SECONDS",
        help="how long the ranks may make no progress before a hang is reported (default: 10, or ten "
        "times the usual time between two collectives, if that is longer); 0 switches it off",
    )
    hangs.add_argument(
        "--on-hang",
        choices=("report", "end"),
        default="report",
        help="whether a hang is only reported or also ends the ranks, as a failure does; `end` needs "
        "--hang-after (default: report)",
    )
    if not any(argument.dest == "shutdown_timeout" for argument in ours.arguments):  # torch 2.11
        ours.add_argument(
            "--shutdown-timeout",
            type=int,
            metavar="SECONDS",
            help="how long ranks may take to end after SIGTERM before they are killed (default: "
            f"{_GRACE_S:.0f} after a failure, else {_SHUTDOWN_VARIABLE} or {_SAVE_GRACE_S:.0f})",
        )
    # In the help, our options come before torchrun's.
    ours._action_groups.sort(key=lambda group: group not in (hosts, hangs))
    if "PET_MASTER_PORT" not in os.environ:
        # Older torch has a number here, which could not be distinguished from a port that the user chose.
        ours.set_defaults(master_port=None)
    if "PET_NODE_RANK" not in os.environ:
        ours.set_defaults(node_rank=None)  # torch's default is 0, which a user may also give
    return ours


def read_options(argv: Sequence[str]) -> LaunchOptions:
    """Parse a command line.

    Raises:
        ConfigError: a wrong value.
        SystemExit: by torch's parser, for an unknown option or --help.
    """
    ours = parser()
    own, script_args = _split_at_script(ours, argv)
    args = ours.parse_args(own)
    args.training_script_args = script_args
    if args.run_path:  # in torch it overrides the other two
        args.module = args.no_python = False
    notes: list[str] = []
    _check(args)
    node_rank = args.node_rank
    if not args.standalone:
        node_rank = _apply_slurm(args, os.environ, node_rank, notes)
    ports = _port_range(args)
    _apply_host(args, ports)
    args.node_rank = node_rank or 0
    address = _local_address(args, notes)
    if address is not None and args.rdzv_id == "none":
        args.rdzv_id = str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = _DEFAULT_PORT
    # --log-dir alone is the folder for reports of failures.
    uses_logs = args.redirects != "0" or args.tee != "0" or args.logs_specs is not None
    config = _configure(args, uses_logs)
    if address is None and args.node_rank and args.rdzv_backend not in ("static", "c10d"):
        notes.append(f"--node-rank is not used with --rdzv-backend={args.rdzv_backend}")
    if ports is not None and (address is not None or args.rdzv_backend != "c10d"):
        raise ConfigError(
            "--port-range has no effect here.",
            why="one node needs no open port, and torch chooses the ports of static and etcd rendezvous.",
            fix="leave it out, or give --nnodes and --host.",
        )
    for word in args.training_script_args:
        name = word.partition("=")[0].replace("_", "-")
        if name in ("--nproc-per-node", "--nnodes", "--max-restarts"):
            notes.append(
                f"{name} after the script is given to the script; the launcher's options come first"
            )
    if uses_logs and not args.log_dir and config.logs_specs is not None:
        notes.append(f"logs are in {config.logs_specs.root_log_dir}")
    return LaunchOptions(args, config, address, node_rank, ports, uses_logs, tuple(notes))


def _split_at_script(ours: CommandParser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words up to the script, and those after it.

    argparse would look for abbreviations of the launcher's options among the script's.
    """
    takes_value = {name: a.nargs != 0 for a in ours.arguments for name in a.option_strings}
    position = 0
    while position < len(argv) and (word := argv[position]).startswith("-") and word != "-":
        position += 1
        if word == "--":
            break
        name, equals, _ = word.partition("=")
        if not name.startswith("--"):  # a value may follow at once, such as -r3
            name, equals = word[:2], word[2:]
        found = {takes_value[n] for n in takes_value if n == name} or {
            takes_value[n] for n in takes_value if n.startswith(name)
        }
        if len(found) != 1:
            return list(argv), []  # the parser refuses the word
        position += found.pop() and not equals
    return list(argv[: position + 1]), list(argv[position + 1 :])


def _port_range(args: Namespace) -> tuple[int, int] | None:
    if args.port_range is None:
        return None
    first, _, last = args.port_range.partition("-")
    if first.isdecimal() and last.isdecimal() and 0 < int(first) < int(last) < 1 << 16:
        return int(first), int(last)
    raise ConfigError(
        f"--port-range must be FIRST-LAST, and is {args.port_range!r}.",
        why="a launcher may need two ports: for the rendezvous, and for the store of the ranks.",
        fix="give two ports from 1 to 65535, such as --port-range=29500-29550.",
    )


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
    gpus, ranks = environ.get("SLURM_GPUS_ON_NODE", ""), args.nproc_per_node
    if gpus.isdecimal() and ranks.isdecimal() and 0 < int(gpus) < int(ranks):
        raise ConfigError(
            f"--nproc-per-node is {ranks}, and Slurm gave this node {count_of(int(gpus), 'GPU')}.",
            why="each rank needs a GPU of its own.",
            fix=f"`#SBATCH --gpus-per-node={ranks}`, or --nproc-per-node={gpus}.",
        )
    nodes = len(step.tasks)
    if given or nodes == 1:
        return node_rank
    args.nnodes, args.host = str(nodes), step.endpoint
    if args.rdzv_id == "none":
        args.rdzv_id = step.key  # so that two jobs whose ports are equal never mix
    notes.append(f"Slurm step of {nodes} nodes: --nnodes={nodes} --host={args.host}")
    return step.node_rank if node_rank is None else node_rank


def _apply_host(args: Namespace, ports: tuple[int, int] | None) -> None:
    """Turn --host into torch's options."""
    if args.host is None:
        return
    host, port = _host_and_port(args.host)
    given = [
        name
        for name, is_given in (
            ("--rdzv-endpoint", bool(args.rdzv_endpoint)),
            ("--rdzv-backend", args.rdzv_backend not in ("static", "c10d")),
            # Kubeflow sets PET_MASTER_PORT for all jobs.
            ("--master-port", args.master_port is not None and "PET_MASTER_PORT" not in os.environ),
            ("--standalone", args.standalone),
        )
        if is_given
    ]
    if given:
        raise ConfigError(
            f"--host and {given[0]} contradict each other.",
            fix=f"leave one of them out; a port is given as --host {host}:PORT.",
        )
    args.rdzv_backend = "c10d"
    default = ports[0] if ports is not None else C10D_PORT
    args.rdzv_endpoint = f"{host}:{default if port is None else port}"


def _host_and_port(text: str) -> tuple[str, int | None]:
    """The host of --host, an IPv6 address in brackets, and its port if there is one."""
    host, port = text, None
    if found := re.fullmatch(r"(\[.+\]|[^:]*):(\d+)", text):
        host, port = found[1], int(found[2])
    with contextlib.suppress(ValueError):
        host = f"[{ipaddress.IPv6Address(host.strip('[]'))}]"
    if not re.fullmatch(r"\[.*:.*\]|[\w.-]+", host) or not (port is None or 0 < port < 1 << 16):
        raise ConfigError(
            f"--host is {text!r}, which is not a host name or address.",
            fix="give HOST or HOST:PORT, such as 10.0.0.1, node0:29400 or [fd00::1]:29400.",
        )
    return host, port


def _configure(args: Namespace, uses_logs: bool) -> LaunchConfig:
    given = dict(vars(args))
    if not uses_logs:
        given["log_dir"] = os.devnull  # otherwise torch leaves a temporary directory behind
    if args.rdzv_backend != "static":
        given["node_rank"] = 0  # torch warns that c10d does not use it; `NodeRendezvous` does
    before = os.environ.get("OMP_NUM_THREADS")
    try:
        # If it is not set, torch sets it to 1 and prints a warning of five lines.
        os.environ["OMP_NUM_THREADS"] = before or "1"
        config: LaunchConfig = config_from_args(Namespace(**given))[0]
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        raise ConfigError(f"{error}".rstrip(".") + ".", fix="see `paceline run --help`.") from error
    finally:
        if before is None:
            os.environ.pop("OMP_NUM_THREADS", None)
    if config.nproc_per_node < 1:
        raise ConfigError(
            f"--nproc-per-node must be at least 1, and is {config.nproc_per_node}.",
            fix="give the number of processes on this node, or `gpu`, or `cpu`.",
        )
    return config


def _check_nproc(word: str) -> None:
    try:
        determine_local_world_size(word)
    except (ValueError, AssertionError, RuntimeError, AttributeError) as error:
        if word in ("gpu", "xpu"):
            raise ConfigError(
                f"--nproc-per-node={word}, and torch finds no {word.upper()} on this host.",
                where=f"host {socket.gethostname()}, torch {torch.__version__}",
                why="this torch was built without support for it, none is visible, or its driver does not "
                "answer.",
                fix="run `paceline doctor`; to run without it, give a number or --nproc-per-node=cpu.",
            ) from error
        raise ConfigError(
            f"--nproc-per-node must be a number, and is {word!r}.",
            where="the command line, or PET_NPROC_PER_NODE",
            why="other values are `gpu` and `xpu` (one rank for each device), `cpu` (one for each core) "
            "and `auto`.",
            fix="give the number of ranks on this node, such as --nproc-per-node=2.",
        ) from error


def _diagnosis_options(args: Namespace) -> list[str]:
    """The given options that need the probe of the ranks, and the agent of Paceline."""
    options = {
        "--hang-after": args.hang_after is not None,
        "--on-hang=end": args.on_hang == "end",
    }
    return [name for name, is_given in options.items() if is_given]


def _check(args: Namespace) -> None:
    _check_nproc(args.nproc_per_node)
    if args.hang_after is not None and not 0 <= args.hang_after < float("inf"):
        raise ConfigError(
            f"--hang-after must be a number of seconds, or 0 to switch it off; it is {args.hang_after}."
        )
    if not args.hang_after and args.on_hang == "end":
        raise ConfigError(
            "--on-hang=end needs --hang-after with the seconds after which a hang ends the ranks.",
            fix="add, for example, --hang-after=600.",
        )
    if (args.no_python or not has_probe()) and (given := _diagnosis_options(args)):
        raise ConfigError(
            f"{given[0]} has no effect with --no-python or PACELINE_PROBE=0.",
            why="a thread in each rank reports what the rank does.",
            fix="leave one of them out.",
        )
    for name, timeout in (
        ("--shutdown-timeout", args.shutdown_timeout),
        (_SHUTDOWN_VARIABLE, os.environ.get(_SHUTDOWN_VARIABLE)),
    ):
        if timeout is not None and not str(timeout).isdecimal():
            raise ConfigError(
                f"{name} must be a whole number of seconds, and is {timeout!r}.",
                fix="give a number from 0 on, or leave it out.",
            )
    if args.start_method != "spawn":
        raise ConfigError(
            f"--start-method={args.start_method} has no effect here.",
            why="the launcher starts a new interpreter for each rank.",
            fix="leave it out.",
        )
    if args.duplicate_stdout_filters or args.duplicate_stderr_filters:
        raise ConfigError(
            "--duplicate-stdout-filters and --duplicate-stderr-filters cannot be used here.",
            why="the launcher writes whole log files only.",
            fix="add --tee 3 and --log-dir, and search the log files with grep.",
        )
    if args.no_python and shutil.which(args.training_script) is None:
        raise ConfigError(
            f"there is no program {args.training_script!r}.",
            fix="with --no-python, give the path of an executable file, or a name that is on PATH.",
        )


def _local_address(args: Namespace, notes: list[str]) -> tuple[str, int] | None:
    """Where a single node binds its store; None if torch's rendezvous serves the store."""
    try:
        _, max_nodes = parse_min_max_nnodes(args.nnodes)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--nnodes must be a number or MIN:MAX, and is {args.nnodes!r}."
        ) from error
    if max_nodes < 1:
        raise ConfigError(
            f"--nnodes must be 1 or more, and is {args.nnodes}.",
            fix="give the number of nodes, or MIN:MAX.",
        )
    host = args.local_addr or args.master_addr
    if args.standalone:
        if max_nodes != 1:
            raise ConfigError(
                f"--standalone is for one node, and --nnodes is {args.nnodes}.",
                fix="leave one of them out.",
            )
        if args.rdzv_endpoint or args.rdzv_backend != "static" or args.master_port is not None:
            notes.append("--standalone: the rendezvous options and --master-port are not used")
        return args.local_addr or "127.0.0.1", 0
    if args.rdzv_backend in ("static", "c10d") and not 0 <= args.node_rank < max_nodes:
        there = "is 1 node" if max_nodes == 1 else f"are {max_nodes} nodes"
        raise ConfigError(
            f"--node-rank is {args.node_rank}, and there {there}.",
            why="nodes are numbered from 0, and the others would wait for the node of the missing number.",
            fix=f"give a --node-rank from 0 to {max_nodes - 1}."
            if max_nodes > 1
            else "give --nnodes, or leave it out.",
        )
    endpoint = args.rdzv_endpoint.strip()
    if max_nodes != 1:
        if args.rdzv_backend in ("static", "c10d"):
            _parse_endpoint(endpoint)
        return None
    if args.rdzv_backend == "static" and not endpoint:
        return host, args.master_port or 0
    if args.rdzv_backend not in ("static", "c10d") or args.rdzv_conf:
        return None
    if not endpoint:
        return "127.0.0.1", 0
    host, port = _parse_endpoint(endpoint)
    if not is_loopback(host) and args.rdzv_backend == "c10d":
        return None
    return "127.0.0.1" if host == "localhost" else host, port


def _parse_endpoint(endpoint: str) -> tuple[str, int]:
    try:
        host, port = parse_rendezvous_endpoint(endpoint, C10D_PORT)
    except ValueError as error:
        raise ConfigError(
            f"--rdzv-endpoint is not an address: {endpoint!r}.", fix="give HOST:PORT."
        ) from error
    return host, port
