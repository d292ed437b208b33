"""What a user asks of a scheduler, in units that do not depend on it; the formats of times and sizes."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Protocol

from paceline.command_line import CommandParser
from paceline.credentials import is_secret_name
from paceline.errors import ConfigError

# A larger number is usually that of the whole job.
_MAX_GPUS = 16

# The launcher kills ranks that have not saved in time. It then still has to report, and to end.
LAUNCHER_MARGIN_S = 15

# What the Dockerfile of `paceline job docker` makes, and all files of containers use.
WORKSPACE = "/workspace"
RUN_FOLDER = f"{WORKSPACE}/runs"
USER = 1000
PORT = 29400
_USED_FOLDERS = (WORKSPACE, "/opt/venv", "/dev/shm")
_SHM_MIB_PER_RANK = 2048

# The variable that tells the launcher how long its ranks may take to save.
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"

_UNITS_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_UNITS_MIB = {"M": 1, "G": 1024, "T": 1024**2}
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"


@dataclass(frozen=True)
class JobRequest:
    """What a user asks for. All amounts are per node.

    Args:
        script: Path of the script, or a module's name.
        arguments: The script's own.
        module: Whether `script` is a module's name.
        name: Name of the job; by default that of the script.
        nodes: Number of nodes.
        gpus: GPUs of a node; 0 trains on CPU.
        ranks: Ranks of a node; by default one for each GPU, or 1.
        cpus: Cores of a node; None is one for each rank under Slurm, and else leaves it to the scheduler.
        memory_mib: Memory of a node in MiB; None leaves it to the scheduler.
        time_s: The longest time that the job may run, in seconds; None for no limit.
        grace_s: Time for a step and a save after the notice of a preemption, in seconds.
        max_restarts: How often the launcher starts the ranks again without the scheduler.
        image: The container image; empty if the scheduler needs none.
        run_folder: Where the script writes checkpoints and logs; empty for the scheduler's default.
        variables: Environment variables with values that may be public.
        secrets: Environment variables whose values stay out of the files; what a value means is the
            scheduler's choice.

    Raises:
        ConfigError: amounts or names that cannot work anywhere.
    """

    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    name: str = ""
    nodes: int = 1
    gpus: int = 0
    ranks: int | None = None
    cpus: int | None = None
    memory_mib: int | None = None
    time_s: int | None = None
    grace_s: int = 120
    max_restarts: int = 3
    image: str = ""
    run_folder: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.gpus > _MAX_GPUS:
            raise ConfigError(
                f"--gpus must be at most {_MAX_GPUS}, got {self.gpus}.",
                why="--gpus is the number of GPUs of one node; a larger number is usually that of the job.",
                fix=f"for {self.gpus} GPUs on hosts with 8 each, give --nodes {-(-self.gpus // 8)} --gpus 8.",
            )
        if self.gpus and self.ranks is not None and self.ranks > self.gpus:
            raise ConfigError(
                f"--nproc-per-node is {self.ranks}, and a node has {self.gpus} GPUs.",
                why="each rank needs a GPU of its own.",
                fix=f"give --gpus {self.ranks}, or leave --nproc-per-node out.",
            )
        if self.time_s is not None and self.time_s <= self.grace_s + LAUNCHER_MARGIN_S:
            raise ConfigError(
                f"--time is {self.time_s} s, and a job needs more than {self.grace_s + LAUNCHER_MARGIN_S} s.",
                why=f"--grace keeps {self.grace_s} s for the last save, and the launcher needs "
                f"{LAUNCHER_MARGIN_S} s to end.",
                fix="give more --time or less --grace.",
            )
        if both := sorted(self.variables.keys() & self.secrets.keys()):
            raise ConfigError(f"{both[0]} is given by --env and by --secret.", fix="give one.")
        for name in (*self.variables, *self.secrets):
            if name == SHUTDOWN_TIMEOUT:
                raise ConfigError(f"{name} follows from --grace.", fix="give --grace instead.")
        for name, value in self.variables.items():
            if is_secret_name(name) and value:
                raise ConfigError(
                    f"--env would write the value of {name} into the file.",
                    why="the name is that of a secret, and files are copied and committed.",
                    fix=f"use --secret {name} instead; see --help.",
                )

    @property
    def ranks_per_node(self) -> int:
        """Ranks of a node."""
        return self.ranks if self.ranks is not None else max(1, self.gpus)

    @property
    def job_name(self) -> str:
        """The given name, or that of the script or module."""
        if self.name:
            return self.name
        path = PurePosixPath(self.script)
        return self.script.rpartition(".")[2] if self.module else path.stem

    @property
    def default_name(self) -> str:
        """The name of the job in lower-case letters, digits and hyphens, unless the user gave one."""
        return self.name or re.sub(r"[^a-z0-9]+", "-", self.job_name.lower()).strip("-")

    def shm_mib(self, given: int | None) -> int:
        """Size of /dev/shm in a container: the given one, or 2 GiB for each rank, at most half the memory."""
        if given is not None:
            return given
        default = _SHM_MIB_PER_RANK * self.ranks_per_node
        return default if self.memory_mib is None else max(1, min(default, self.memory_mib // 2))

    def refuse_references(self, scheduler: str, source: str) -> None:
        """Refuse secrets with a reference, for a scheduler whose secrets have the value of a variable.

        Raises:
            ConfigError: a secret has one.
        """
        for name, reference in self.secrets.items():
            if reference:
                raise ConfigError(
                    f"--secret {name} has the reference {reference!r}, and {scheduler} knows none.",
                    fix=f"give --secret {name}; the value is that of {source}.",
                )

    @property
    def scheduler_grace_s(self) -> int:
        """Seconds between the scheduler's notice and its SIGKILL; the launcher's own limit ends before."""
        return self.grace_s + LAUNCHER_MARGIN_S

    def command(self, *launch: str) -> list[str]:
        """The words of `paceline run`, with further options of the launcher."""
        script = ["-m", self.script] if self.module else [self.script]
        own = [f"--nproc-per-node={self.ranks_per_node}", f"--max-restarts={self.max_restarts}"]
        return ["paceline", "run", *launch, *own, *script, *self.arguments]


@dataclass(frozen=True)
class JobFiles:
    """The files of a job.

    Args:
        files: Text of each file by its name.
        next_steps: What to do with them: lines that the command prints.
    """

    files: Mapping[str, str]
    next_steps: Sequence[str]


class Scheduler(Protocol):
    """What a module of a scheduler has.

    Attributes:
        HELP: One line.
        EXAMPLES: Command lines, and what each does.
        WITHOUT: Common options that have no meaning here: "time", or "output -" if there are several files.
    """

    HELP: str
    EXAMPLES: Mapping[str, str]
    WITHOUT: tuple[str, ...]

    @staticmethod
    def add_options(parser: CommandParser) -> None:
        """Add the scheduler's own options."""

    @staticmethod
    def write(request: JobRequest, options: argparse.Namespace) -> JobFiles:
        """Return the files.

        Raises:
            ConfigError: what this scheduler cannot do.
        """


def duration_s(text: str) -> int:
    """The type of an option: seconds, from `90m`, `4h`, `1d12h`, `04:00:00` or `1-00:00:00`."""
    if clock := re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", text):
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    elif re.fullmatch(r"(\d+d)?(\d+h)?(\d+m)?(\d+s)?", text) and text:
        total = sum(int(n) * _UNITS_S[unit] for n, unit in re.findall(r"(\d+)([dhms])", text))
    else:
        raise argparse.ArgumentTypeError(
            f"must be a time such as 90m, 4h, 1d12h or 1-00:00:00, and is {text!r}"
        )
    if total == 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, and is {text!r}")
    return total


def memory_mib(text: str) -> int:
    """The type of an option: MiB, from `512M`, `64G`, `64Gi`, `64GiB` or `1T`; units are powers of 1024."""
    found = re.fullmatch(r"(\d+)([MGT])(?:i?B|i)?", text, re.I)
    if found is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"must be a size such as 512M or 64G, and is {text!r}")
    return int(found[1]) * _UNITS_MIB[found[2].upper()]


def variable(text: str) -> tuple[str, str]:
    """The type of an option: NAME=VALUE."""
    found = re.fullmatch(rf"({_VARIABLE})=([^\n]*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, and is {text!r}")
    return found[1], found[2]


def secret(text: str) -> tuple[str, str]:
    """The type of an option: NAME, or NAME=REFERENCE."""
    found = re.fullmatch(rf"({_VARIABLE})(?:=(\S+))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"must be the name of an environment variable, and is {text!r}"
        )
    return found[1], found[2] or ""


def check_is_in_image(request: JobRequest) -> None:
    """Check that the script can be in an image that is built from this folder.

    Raises:
        ConfigError: it is outside.
    """
    if not request.module and os.path.normpath(request.script).split("/")[0] == "..":
        raise ConfigError(
            f"{request.script!r} is outside of this folder, so an image of this folder does not have it.",
            fix="go to the folder of the project, or give its absolute path in the image.",
        )


def check_run_folder(folder: str) -> None:
    """Check that a volume can be mounted there in a container.

    Raises:
        ConfigError: no absolute path, or the volume would hide the program.
    """
    plain = re.fullmatch(r"(/[\w.-]+)+", folder) and os.path.normpath(folder) == folder
    hides = next((used for used in _USED_FOLDERS if f"{used}/".startswith(f"{folder}/")), "")
    inside = next((used for used in _USED_FOLDERS[1:] if folder.startswith(f"{used}/")), "")
    if not plain or hides or inside:
        raise ConfigError(
            f"--run-folder is {folder!r}, and a volume cannot be mounted there.",
            why=f"the container has other files in {hides or inside}." if hides or inside else "",
            fix=f"give an absolute path in the container, such as --run-folder {RUN_FOLDER}.",
        )


def add_shm_size(parser: CommandParser, note: str = "") -> None:
    """Add the option for the size of /dev/shm."""
    parser.add_argument(
        "--shm-size",
        type=memory_mib,
        metavar="SIZE",
        help=f"size of /dev/shm{note} (default: 2G for each rank, at most half of --memory)",
    )


def check_image(option: str, image: str) -> None:
    """Check the name of a container image, with its registry, tag and digest.

    Raises:
        ConfigError: it is not a valid image name.
    """
    component = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
    host = r"(?:(?:localhost|[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+|[A-Za-z0-9.-]+(?=:\d+/))(?::\d+)?/)?"
    pattern = (
        rf"{host}{component}(?:/{component})*(?::[\w][\w.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?"
    )
    if not re.fullmatch(pattern, image):
        raise ConfigError(
            f"{option} {image!r} is not a valid image name.",
            fix="give REGISTRY/NAME:TAG, such as registry.example/me/train:1.",
        )
