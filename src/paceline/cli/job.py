"""`paceline job`: write the files that start a job on a cluster. Nothing here imports torch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.command_line import (
    CommandParser,
    nearest_file,
    not_negative_count,
    positive_count,
)
from paceline.errors import ConfigError, render
from paceline.exit_codes import ExitCode
from paceline.schedulers.request import (
    JobFiles,
    JobRequest,
    Scheduler,
    duration_s,
    memory_mib,
    secret,
    variable,
)

HELP = "write the files that start a job on a cluster"
SCHEDULERS = ("slurm", "k8s", "docker")
_EXIT_CODES: dict[ExitCode | str, str] = {
    ExitCode.OK: "the files were written",
    ExitCode.USAGE: "the command line is wrong",
    ExitCode.CANNOT_CREATE: "a file exists with another content, or cannot be written",
}
_UNKNOWN = "the script's own arguments follow `--`, such as `paceline job {} train.py -- --lr 1`."


def main(argv: Sequence[str]) -> int:
    """Run `paceline job` with these arguments. Returns 0, 2, or 73 if a file cannot be written."""
    own, script = list(argv), []
    if "--" in own:
        split = own.index("--")
        own, script = own[:split], own[split + 1 :]
    args = _parse(own)
    try:
        for word in argv:
            if any("\ud800" <= letter <= "\udfff" for letter in word):
                raise ConfigError(
                    f"{word!r} has bytes that are not UTF-8.", fix="give another name."
                )
        _check_script(args)
        job = _scheduler(args.scheduler).write(_request(args, script), args)
        if args.output == "-" and len(job.files) > 1:
            raise ConfigError(
                f"`--output -` prints one file, and there are {len(job.files)}.",
                fix="give a folder, or leave --output out.",
            )
    except ConfigError as error:
        print(f"paceline job {args.scheduler}: {error}", file=sys.stderr)
        return ExitCode.USAGE
    if args.output == "-":
        print(next(iter(job.files.values())), end="")
        return ExitCode.OK
    return _save(job, args)


def _parse(words: Sequence[str]) -> Any:
    ours = parser()
    schedulers = next(a.choices for a in ours.arguments if isinstance(a.choices, Mapping))
    if not words or words[0] not in schedulers:
        return ours.parse_args(words)  # prints the help or an error
    # argparse would let `ours` report an option that only the scheduler can have.
    return schedulers[words[0]].parse_args(words[1:], argparse.Namespace(scheduler=words[0]))


def _save(job: JobFiles, args: argparse.Namespace) -> int:
    folder = Path(args.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in job.files.items():
            file = folder / name
            if file.exists() and file.read_bytes() != text.encode() and not args.force:
                what = f"paceline job {args.scheduler}: {file} exists with another content."
                fix = "give --force to overwrite it, or another --output."
                print(render(what, fix=fix), file=sys.stderr)
                return ExitCode.CANNOT_CREATE
        for name, text in job.files.items():
            (folder / name).write_bytes(text.encode())
    except OSError as error:
        print(
            f"paceline job {args.scheduler}: {error.filename} cannot be written: {error.strerror}.",
            file=sys.stderr,
        )
        return ExitCode.CANNOT_CREATE
    print(f"wrote {', '.join(str(folder / name) for name in job.files)}. Next:")
    for line in job.next_steps:
        print(f"  {line}")
    return ExitCode.OK


def _scheduler(name: str) -> Scheduler:
    # A module has the attributes of the protocol.
    return import_module(f"paceline.schedulers.{name}")  # type: ignore[return-value]


def _check_script(args: argparse.Namespace) -> None:
    if args.module:
        return
    if os.path.isabs(args.script):
        here = os.path.relpath(args.script)
        if not here.startswith(".."):
            raise ConfigError(
                f"{args.script!r} is a path of this machine.",
                why="the files must also work where this folder has another path.",
                fix=f"give the path relative to this folder: {here}",
            )
    elif not os.path.isfile(args.script) and not os.path.isfile(f"{args.script}/__main__.py"):
        match = nearest_file(args.script)
        mean = f"did you mean {match!r}? Otherwise " if match else ""
        raise ConfigError(
            f"there is no script {args.script!r} in this folder.",
            fix=f"{mean}go to the folder of the project, or give an absolute path that exists on the nodes.",
        )


def _unique(option: str, pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{option} gives {twice[0]} twice.", fix="give it once.")
    return dict(pairs)


def _request(args: argparse.Namespace, script: Sequence[str]) -> JobRequest:
    return JobRequest(
        script=args.script,
        arguments=tuple(script),
        module=args.module,
        name=args.name,
        nodes=args.nodes,
        gpus=args.gpus,
        ranks=args.nproc_per_node,
        cpus=args.cpus,
        memory_mib=args.memory,
        time_s=getattr(args, "time", None),
        grace_s=args.grace,
        max_restarts=args.max_restarts,
        image=getattr(args, "image", ""),
        run_folder=args.run_folder,
        variables=_unique("--env", args.env),
        secrets=_unique("--secret", args.secret),
    )


def parser() -> CommandParser:
    """The options of `paceline job`; the script's own arguments, after `--`, are split off before."""
    modules = {name: _scheduler(name) for name in SCHEDULERS}
    ours = CommandParser(
        "paceline job",
        usage="paceline job SCHEDULER SCRIPT [options] [-- ARGUMENTS]",
        description="Write the files that start a job on a cluster: to read, to change and to commit. "
        "Nothing is submitted.",
        examples={
            line: text for module in modules.values() for line, text in module.EXAMPLES.items()
        },
        exit_codes=_EXIT_CODES,
    )
    schedulers = ours.add_subparsers(
        dest="scheduler", required=True, metavar="SCHEDULER", prog="paceline job"
    )
    for name, module in modules.items():
        one = schedulers.add_parser(
            name,
            usage=f"paceline job {name} SCRIPT [options] [-- ARGUMENTS]",
            help=module.HELP,
            description=module.HELP[0].upper() + module.HELP[1:] + ".",
            examples=module.EXAMPLES,
            exit_codes=_EXIT_CODES,
            unknown_option=_UNKNOWN.format(name),
        )
        _add_common(one, module.WITHOUT)
        module.add_options(one)
    return ours


def _add_common(one: CommandParser, without: Sequence[str]) -> None:
    one.add_argument(
        "script",
        metavar="SCRIPT",
        help="the training script, relative to this folder, or an absolute path on the nodes",
    )
    one.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module name")
    one.add_argument(
        "--nodes", type=positive_count, default=1, metavar="N", help="number of nodes (1)"
    )
    one.add_argument(
        "--gpus", type=not_negative_count, default=0, metavar="N", help="GPUs of a node (0)"
    )
    one.add_argument(
        "--nproc-per-node",
        type=positive_count,
        metavar="N",
        help="ranks of a node (default: one for each GPU, or 1)",
    )
    one.add_argument("--cpus", type=positive_count, metavar="N", help="cores of a node")
    one.add_argument(
        "--memory", type=memory_mib, metavar="SIZE", help="memory of a node, such as 64G"
    )
    if "time" not in without:
        one.add_argument(
            "--time",
            type=duration_s,
            metavar="TIME",
            help="longest time of the job, such as 4h or 1-00:00:00; Slurm counts it anew when the job was "
            "queued again, and Kubernetes ends the job after it",
        )
    one.add_argument(
        "--grace",
        type=duration_s,
        default=120,
        metavar="TIME",
        help="time for a step and a save when the job is preempted (2m)",
    )
    one.add_argument(
        "--max-restarts",
        type=not_negative_count,
        default=3,
        metavar="N",
        help="how often the ranks are started again after a failure (3)",
    )
    one.add_argument(
        "--name", default="", metavar="NAME", help="name of the job (default: the script's)"
    )
    one.add_argument(
        "--run-folder",
        default="",
        metavar="PATH",
        help="where the script writes checkpoints and logs, as the nodes see it",
    )
    one.add_argument(
        "--env",
        type=variable,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an environment variable of the job; may be given several times",
    )
    one.add_argument(
        "--secret",
        type=secret,
        action="append",
        default=[],
        metavar="NAME",
        help="an environment variable whose value is not written into the file",
    )
    prints = "" if "output -" in without else "; `-` prints the file"
    one.add_argument(
        "--output",
        default=".",
        metavar="FOLDER",
        help=f"where to write the files (default: this folder){prints}",
    )
    one.add_argument("--force", action="store_true", help="overwrite files that exist")
