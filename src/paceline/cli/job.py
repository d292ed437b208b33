"""`paceline job`: write the files that start a job on a cluster. Nothing here imports torch."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.command_line import (
    CommandParser,
    nearest_file,
    not_negative_count,
    positive_count,
)
from paceline.errors import ConfigError, render
from paceline.exit_codes import ExitCode
from paceline.schedulers.files import KINDS, JobFiles, JobRequest, docker, k8s, slurm

HELP = "write the files that start a job on a cluster"
_SCHEDULERS = {
    "slurm": "write a batch script for Slurm",
    "k8s": "write a Job with a Service for Kubernetes, a JobSet, or a TrainJob of Kubeflow",
    "docker": "write a Dockerfile, and a Compose file that starts its image on several nodes",
}
_EXAMPLES = {
    "slurm": {
        "paceline job slurm train.py --nodes 2 --gpus 8 --time 4h -- --lr 0.1": "train.slurm, two nodes "
        "with 8 GPUs each; --lr is the script's"
    },
    "k8s": {
        "paceline job k8s train.py --image registry.example/me/train:1 --nodes 2 --gpus 8": "an Indexed "
        "Job with a headless Service in train.k8s.yaml",
        "paceline job k8s train.py --image me/train:1 --kind trainjob --nodes 2": "a TrainJob",
    },
    "docker": {
        "paceline job docker train.py --nodes 2 --output containers": "Dockerfile and compose.yaml in the "
        "folder `containers`, two nodes with one rank each"
    },
}
_EXIT_CODES: dict[ExitCode | str, str] = {
    ExitCode.OK: "the files were written",
    ExitCode.USAGE: "the command line is wrong",
    ExitCode.CANNOT_CREATE: "a file exists with another content, or cannot be written",
}
_UNITS_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def main(argv: Sequence[str]) -> int:
    """Run `paceline job` with these arguments. Returns 0, 2, or 73 if a file cannot be written."""
    own, script = list(argv), []
    if "--" in own:
        split = own.index("--")
        own, script = own[:split], own[split + 1 :]
    args = parser().parse_args(own)
    try:
        for word in argv:
            if not word.isprintable():  # such as a line break, which would begin a line of the file
                raise ConfigError(
                    f"{word!r} has characters that cannot be printed.", fix="leave them out."
                )
        job = _job(args, script)
        _write(job, Path(args.output), force=args.force)
    except ConfigError as error:
        print(f"paceline job {args.scheduler}: {error}", file=sys.stderr)
        return ExitCode.USAGE
    except FileExistsError as error:
        what = f"paceline job {args.scheduler}: {error} exists with another content."
        fix = "give --force to overwrite it, or another --output."
        print(render(what, fix=fix), file=sys.stderr)
        return ExitCode.CANNOT_CREATE
    except OSError as error:
        what = f"{error.filename} cannot be written: {error.strerror}."
        print(f"paceline job {args.scheduler}: {what}", file=sys.stderr)
        return ExitCode.CANNOT_CREATE
    print(f"wrote {', '.join(os.path.join(args.output, name) for name in job.files)}. Next:")
    for line in job.next_steps:
        print(f"  {line}")
    return ExitCode.OK


def _job(args: argparse.Namespace, arguments: Sequence[str]) -> JobFiles:
    if not args.module:
        _check_script(args.script)
    request = JobRequest(
        script=[*(["-m"] if args.module else []), args.script, *arguments],
        name=args.name,
        nodes=args.nodes,
        gpus=args.gpus,
        ranks=args.nproc_per_node,
        cpus=args.cpus,
        memory=args.memory,
        time_s=getattr(args, "time", None),
        grace_s=args.grace,
        run_folder=args.run_folder,
    )
    request.check()
    if args.scheduler == "k8s":
        return k8s(request, args.output, image=args.image, kind=args.kind)
    return (slurm if args.scheduler == "slurm" else docker)(request, args.output)


def _check_script(script: str) -> None:
    if os.path.isabs(script):
        here = os.path.relpath(script)
        if not here.startswith(".."):
            raise ConfigError(
                f"{script!r} is a path of this machine.",
                why="the files must also work where this folder has another path.",
                fix=f"give the path relative to this folder: {here}",
            )
    elif not os.path.isfile(script) and not os.path.isfile(f"{script}/__main__.py"):
        match = nearest_file(script)
        mean = f"did you mean {match!r}? Otherwise " if match else ""
        raise ConfigError(
            f"there is no script {script!r} in this folder.",
            fix=f"{mean}go to the folder of the project, or give an absolute path that exists on the nodes.",
        )


def _write(job: JobFiles, folder: Path, *, force: bool) -> None:
    """Write all files, or none if one exists with another content."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in job.files.items():
        file = folder / name
        if file.exists() and file.read_bytes() != text.encode() and not force:
            raise FileExistsError(str(file))
    for name, text in job.files.items():
        (folder / name).write_bytes(text.encode())


def _duration_s(text: str) -> int:
    found = re.findall(r"(\d+)([dhms])", text)
    total = sum(int(number) * _UNITS_S[unit] for number, unit in found)
    if total == 0 or text != "".join(number + unit for number, unit in found):
        raise argparse.ArgumentTypeError(
            f"must be a time such as 90m, 4h or 1d12h, and is {text!r}"
        )
    return total


def _memory(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*[MG]", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be a size such as 512M or 64G, and is {text!r}")
    return text


def parser() -> CommandParser:
    """The options of `paceline job`; the script's own arguments, after `--`, are split off before."""
    ours = CommandParser(
        "paceline job",
        usage="paceline job SCHEDULER SCRIPT [options] [-- ARGUMENTS]",
        description="Write the files that start a job on a cluster: to read, to change and to commit. "
        "Nothing is submitted.",
        examples={line: text for each in _EXAMPLES.values() for line, text in each.items()},
        exit_codes=_EXIT_CODES,
    )
    schedulers = ours.add_subparsers(
        dest="scheduler", required=True, metavar="SCHEDULER", prog="paceline job"
    )
    for name, text in _SCHEDULERS.items():
        one = schedulers.add_parser(
            name,
            usage=f"paceline job {name} SCRIPT [options] [-- ARGUMENTS]",
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            examples=_EXAMPLES[name],
            exit_codes=_EXIT_CODES,
            unknown_option=f"the script's own arguments follow `--`, such as `paceline job {name} train.py "
            "-- --lr 1`; for options of the scheduler, change the written file.",
        )
        _add_options(one, name)
    return ours


def _add_options(one: CommandParser, scheduler: str) -> None:
    add = one.add_argument
    add(
        "script", metavar="SCRIPT", help="relative to this folder, or an absolute path on the nodes"
    )
    add("-m", "--module", action="store_true", help="SCRIPT is a module name")
    add("--nodes", type=positive_count, default=1, metavar="N", help="number of nodes (1)")
    add("--gpus", type=not_negative_count, default=0, metavar="N", help="GPUs of a node (0)")
    add(
        "--nproc-per-node",
        type=positive_count,
        metavar="N",
        help="ranks of a node (default: one for each GPU, or 1)",
    )
    add("--cpus", type=positive_count, metavar="N", help="cores of a node")
    add("--memory", type=_memory, metavar="SIZE", help="memory of a node, such as 64G")
    if scheduler != "docker":
        add("--time", type=_duration_s, metavar="TIME", help="longest time of the job, such as 4h")
    add(
        "--grace",
        type=_duration_s,
        default=120,
        metavar="TIME",
        help="time for a step and a save when the job is preempted (2m)",
    )
    add("--name", default="", metavar="NAME", help="name of the job (default: the script's)")
    add(
        "--run-folder",
        default="",
        metavar="PATH",
        help="where the script writes checkpoints and logs, as the nodes see it",
    )
    if scheduler == "k8s":
        add("--image", required=True, metavar="IMAGE", help="with paceline and the script")
        add(
            "--kind",
            choices=KINDS,
            default="job",
            help="Job, JobSet, or TrainJob of Kubeflow (job)",
        )
    add("--output", default=".", metavar="FOLDER", help="where to write the files (this folder)")
    add("--force", action="store_true", help="overwrite files that exist")
