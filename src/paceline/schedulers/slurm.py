"""Slurm: a batch script with one launcher for each node.

Source: the manual pages of sbatch and srun, Slurm 22.05.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex

from paceline.command_line import CommandParser
from paceline.errors import ConfigError
from paceline.exit_codes import ExitCode
from paceline.schedulers.request import (
    LAUNCHER_MARGIN_S,
    SHUTDOWN_TIMEOUT,
    JobFiles,
    JobRequest,
)

HELP = "write a batch script for Slurm"
EXAMPLES = {
    "paceline job slurm train.py --nodes 2 --gpus 8 --time 4h": "train.slurm, two nodes with 8 GPUs each; "
    "submit it with `sbatch train.slurm`",
    "paceline job slurm train.py --partition gpu --setup 'module load cuda' -- --lr 0.1": "one node; a "
    "command before the training; --lr is the script's",
}
WITHOUT = ()

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_OPTION = re.compile(r"[a-z][a-z-]*(=\S+)?")
# sbatch reads no quotes in its lines, and replaces % in the path of the output.
_FOLDER = re.compile(r"[\w./+-]+")
_MAX_SIGNAL_S = 65535  # of sbatch's --signal
# What the file sets itself, what has an option of its own, and what would change the number of launchers.
_OURS = {
    *("job-name", "nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "hetjob"),
    *("gpus", "gpus-per-node", "gpus-per-task", "gres", "cpus-per-task"),
    *("mem", "mem-per-cpu", "mem-per-gpu"),
    *("time", "signal", "requeue", "no-requeue", "output", "open-mode", "partition", "account"),
}


def add_options(parser: CommandParser) -> None:
    """Add the options that only Slurm has."""
    parser.add_argument("--partition", metavar="NAME", help="the partition, as in sbatch")
    parser.add_argument("--account", metavar="NAME", help="the account, as in sbatch")
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="another option of sbatch without its hyphens, such as constraint=a100; may be given several "
        "times",
    )
    parser.add_argument(
        "--setup",
        action="append",
        default=[],
        metavar="COMMAND",
        help="a shell command before the training, such as 'module load cuda'; may be given several times",
    )


def write(request: JobRequest, options: argparse.Namespace) -> JobFiles:
    """Return the batch script.

    Raises:
        ConfigError: a name or an option that sbatch refuses.
    """
    name = request.job_name
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{'--name' if request.name else 'the name of the script'} is {name!r}.",
            why="it becomes the name of a file and of a job.",
            fix="give a --name of letters, digits, dots, hyphens and underscores.",
        )
    request.refuse_references("Slurm", "the shell that calls sbatch")
    if request.scheduler_grace_s > _MAX_SIGNAL_S:
        raise ConfigError(
            f"--grace must be at most {_MAX_SIGNAL_S - LAUNCHER_MARGIN_S} s, got {request.grace_s} s.",
            why="sbatch refuses a longer time between the signal and the end of the job.",
            fix="give less --grace.",
        )
    if request.run_folder and not _FOLDER.fullmatch(request.run_folder):
        raise ConfigError(
            f"--run-folder is {request.run_folder!r}, and sbatch cannot write its output there.",
            fix="give a path of letters, digits, dots, hyphens, plus signs and underscores.",
        )
    file = f"{name}.slurm"
    text = "\n".join(
        [
            "#!/bin/bash",
            "# Written by `paceline job slurm`. Call sbatch in the folder of the project.",
            *(f"#SBATCH --{option}" for option in _options(request, options, name)),
            "",
            *_body(request, options),
        ]
    )
    steps = [
        f"sbatch {shlex.quote(os.path.join(options.output, file))}",
        f"tail -F {_folder(request)}{name}-JOBID.out   # the output; sbatch prints JOBID",
    ]
    if request.run_folder:
        steps.insert(0, f"mkdir -p {request.run_folder}   # sbatch does not create it")
    return JobFiles({file: text + "\n"}, steps)


def _folder(request: JobRequest) -> str:
    """The run folder as the start of a path."""
    return f"{request.run_folder.rstrip('/')}/" if request.run_folder else ""


def _options(request: JobRequest, options: argparse.Namespace, name: str) -> list[str]:
    found = [
        f"job-name={name}",
        f"nodes={request.nodes}",
        # One launcher for each node; it starts the ranks.
        "ntasks-per-node=1",
        f"cpus-per-task={request.cpus or request.ranks_per_node}",
    ]
    if request.gpus:
        found.append(f"gpus-per-node={request.gpus}")
    if request.memory_mib is not None:
        found.append(f"mem={request.memory_mib}M")
    if request.time_s is not None:
        found.append(f"time={_time(request.time_s)}")
    found += [
        # Before the end of the time, the launchers get SIGTERM: the training saves.
        f"signal=TERM@{request.scheduler_grace_s}",
        "requeue",
        f"output={_folder(request)}%x-%j.out",
        "open-mode=append",
    ]
    for key in ("partition", "account"):
        if value := getattr(options, key):
            if not _NAME.fullmatch(value):
                raise ConfigError(f"--{key} is {value!r}.", fix="give a name that Slurm knows.")
            found.append(f"{key}={value}")
    for option in options.sbatch:
        _check(option)
        found.append(option)
    return found


def _check(option: str) -> None:
    if not _OPTION.fullmatch(option):
        raise ConfigError(
            f"--sbatch is {option!r}.",
            fix="give an option of sbatch without its hyphens, such as constraint=a100.",
        )
    if (name := option.partition("=")[0]) in _OURS:
        raise ConfigError(
            f"--sbatch {name} contradicts what is written already.",
            fix="use the option of `paceline job slurm` for it, or change the file.",
        )


def _time(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours:02d}:{minutes:02d}:{rest:02d}"
    return f"{days}-{clock}" if days else clock


def _body(request: JobRequest, options: argparse.Namespace) -> list[str]:
    lines = [f"export {name}={shlex.quote(value)}" for name, value in request.variables.items()]
    lines += [f': "${{{name}:?set it in the shell that calls sbatch}}"' for name in request.secrets]
    lines += options.setup
    # The launcher's own limit must end before that of Slurm.
    lines.append(f"export {SHUTDOWN_TIMEOUT}={request.grace_s}")
    # The number of nodes, the number of this node and the first host come from Slurm.
    # Reports of failures are beside the output.
    command = shlex.join(request.command(f"--log-dir={request.run_folder or '.'}"))
    preempted = int(ExitCode.PREEMPTED)
    return [
        *lines,
        "",
        "code=0",  # a command of --setup may be `set -e`
        "# srun of Slurm 22.05 and later does not take over the cores of the job.",
        f'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" {command} || code=$?',
        "",
        f"# Preempted, or the time is over: the training saved, and goes on when the job has been "
        f"queued again.\nif [ $code -eq {preempted} ]; then",
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        "exit $code",
    ]
