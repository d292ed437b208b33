"""Docker: a Dockerfile for the project of this folder, and a Compose file with one service for each node.

All services run on this host, to try a job of several nodes.

Sources: the Dockerfile reference, and the Compose specification.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import paceline
from paceline.command_line import CommandParser
from paceline.errors import ConfigError
from paceline.schedulers.request import (
    PORT,
    RUN_FOLDER,
    SHUTDOWN_TIMEOUT,
    USER,
    WORKSPACE,
    JobFiles,
    JobRequest,
    add_shm_size,
    check_image,
    check_is_in_image,
    check_run_folder,
)
from paceline.schedulers.yaml_text import Commented, to_yaml

HELP = "write a Dockerfile, and a Compose file that starts its image on several nodes"
EXAMPLES = {
    "paceline job docker train.py --nodes 2": "Dockerfile and compose.yaml, two nodes with one rank each",
    "paceline job docker train.py --gpus 4 --output containers -- --lr 0.1": "one node with 4 GPUs; the "
    "files in the folder `containers`; --lr is the script's",
    "paceline job docker train.py --install '. tensorboard' --secret WANDB_API_KEY": "install the project "
    "of this folder; the value comes from the environment of `docker compose`",
}
WITHOUT = ("time", "output -")

BASE = "python:3.13-slim-trixie@sha256:9d2e5553305c7c7b0097999bb17187c69b921ccd6bc9d40e4bb5ebe652c00285"
_TORCH_CPU = "https://download.pytorch.org/whl/cpu"
_TORCH_CUDA = "https://download.pytorch.org/whl/cu130"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_PLAIN_FILE = re.compile(r"[\w.-]+")
_IGNORED = (
    ".git",
    ".venv",
    "venv",
    "**/__pycache__",
    "**/*.pyc",
    "runs",
    "**/.env",
    "**/.env.*",
    "**/*.pem",
    "**/*.key",
)


def add_options(parser: CommandParser) -> None:
    """Add the options that only Docker has."""
    parser.add_argument(
        "--image",
        default="",
        metavar="IMAGE",
        help="the name of the image (default: that of the job)",
    )
    parser.add_argument(
        "--base",
        default=BASE,
        metavar="IMAGE",
        help=f"the image to build on, with its digest ({BASE.partition('@')[0]})",
    )
    parser.add_argument(
        "--install",
        metavar="WORDS",
        help="what pip installs, such as `.` or `-r requirements.txt` (default: paceline, and "
        "requirements.txt or the project of this folder, if there is one); with constraints.txt, if there "
        "is one",
    )
    add_shm_size(parser)


def write(request: JobRequest, options: argparse.Namespace) -> JobFiles:
    """Return the Dockerfile, the list of ignored files, and the Compose file.

    Raises:
        ConfigError: a name, an image or words that Docker or pip refuse.
    """
    name = _job_name(request)
    image = request.image or name
    check_is_in_image(request)
    check_image("--image" if request.image else "--name", image)
    check_image("--base", options.base)
    check_run_folder(request.run_folder or RUN_FOLDER)
    request.refuse_references("Compose", "the environment of `docker compose`")
    if options.output == "-":
        raise ConfigError(
            "`paceline job docker` always writes 3 files, and `--output -` prints only one.",
            fix="give a folder, or leave --output out.",
        )
    folder = os.path.relpath(options.output)
    if folder.startswith(".."):
        raise ConfigError(
            f"--output is {options.output!r}, outside of this folder.",
            why="the files name the folder of the project relative to themselves.",
            fix="give a folder of the project, such as --output containers.",
        )
    dockerfile = os.path.join("" if folder == "." else folder, "Dockerfile")
    build = f"docker build -t {image} -f {shlex.quote(dockerfile)} ."
    file = shlex.quote(os.path.join(folder, "compose.yaml"))
    compose = "docker compose" + (f" -f {file}" if folder != "." else "")
    steps = [
        f"{compose} up --build",
        f"{compose} stop    # a training saves, and exits with 75",
        build,
    ]
    if options.install is None:
        steps.append(
            f"note: pip gets paceline {paceline.__version__} from its index; --install names another source"
        )
    return JobFiles(
        {
            "Dockerfile": _dockerfile(request, options, build),
            "Dockerfile.dockerignore": "".join(f"{line}\n" for line in _IGNORED),
            "compose.yaml": to_yaml(
                _compose(request, options, name, image, folder),
                comment=f"Written by `paceline job docker`. {compose} up --build",
            ),
        },
        steps,
    )


def _job_name(request: JobRequest) -> str:
    name = request.default_name
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{'--name' if request.name else 'the name of the script'} {name!r} is not a valid Compose name.",
            why="a name has lower-case letters, digits, hyphens and underscores, and begins with a letter or "
            "digit.",
            fix="give another --name.",
        )
    return name


def _install(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The words for pip, and the files that they need; "." for the whole folder."""
    if options.install is not None:
        try:
            words = shlex.split(options.install)
        except ValueError as error:
            raise ConfigError(
                f"--install cannot be read: {error}.", fix="quote it as in a shell."
            ) from error
        if not words or any(not word.isprintable() for word in words):
            raise ConfigError(
                f"--install is {options.install!r}.", fix="say what pip installs, or leave it out."
            )
    else:
        words = [f"paceline=={paceline.__version__}"]
        if os.path.exists("requirements.txt"):
            words += ["-r", "requirements.txt"]
        elif os.path.exists("pyproject.toml"):
            words += ["."]
    words = [part for word in words for part in _separate(word)]
    if "-e" in words:
        raise ConfigError(
            "--install has -e, and an editable project needs its folder, which the image does not have.",
            fix="leave -e out.",
        )
    files = [after for word, after in itertools.pairwise(words) if word in ("-r", "-c")]
    if os.path.exists("constraints.txt") and "constraints.txt" not in files:
        words, files = ["-c", "constraints.txt", *words], ["constraints.txt", *files]
    for file in files:
        is_outside = os.path.isabs(file) or os.path.normpath(file).startswith("..")
        if is_outside or not os.path.isfile(file):
            raise ConfigError(
                f"--install names the file {file!r}, and this folder has none of that name.",
                fix="give a path relative to this folder.",
            )
    lines = [line.strip() for file in files for line in _read(file).splitlines()]
    if any(_separate(line.split()[0])[0] == "-e" for line in lines if line):
        raise ConfigError(
            f"{' or '.join(files)} has a line with -e, and an editable project needs its folder, which the "
            "image does not have.",
            fix="name the project without -e.",
        )
    others = [word for word in words if word not in ("-r", "-c", *files)]
    needs_more = any(line.startswith("-") for line in lines) or any(
        map(_is_path, [*lines, *others])
    )
    return words, ["."] if needs_more or not all(map(_PLAIN_FILE.fullmatch, files)) else files


def _read(file: str) -> str:
    try:
        return Path(file).read_text("utf-8-sig")  # pip accepts a byte order mark
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8.", why=str(error), fix="save it as UTF-8."
        ) from error


def _separate(word: str) -> list[str]:
    """One word of a shell as words of pip: its short options, and their values."""
    for option in ("requirement", "constraint", "editable"):
        word = re.sub(rf"^--{option}(=|$)", f"-{option[0]}", word)
    return re.findall(r"^-[rce](?=.)|.+", word)


def _is_path(requirement: str) -> bool:
    """Whether pip reads a file or folder for it, rather than an index or an address."""
    text = requirement.partition("#")[0].partition("[")[0].strip()
    is_archive = text.endswith((".whl", ".zip", ".gz"))
    return "://" not in text and (text.startswith(".") or "/" in text or is_archive)


def _dockerfile(request: JobRequest, options: argparse.Namespace, build: str) -> str:
    command = json.dumps(request.command(_log_dir(request)), ensure_ascii=False)
    base = options.base.partition("@")[0]
    return f"""# syntax=docker/dockerfile:1
# Written by `paceline job docker`. Change it as you like; it holds no secrets.
#   {build}
# With CUDA:
#   {build} --build-arg TORCH_INDEX={_TORCH_CUDA}

# Pinned by its digest. The newest one: docker buildx imagetools inspect {base}
ARG BASE={options.base}

FROM ${{BASE}} AS build
ARG TORCH_INDEX={_TORCH_CPU}
ENV PATH=/opt/venv/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /build
RUN python -m venv /opt/venv
{_install_steps(options)}
FROM ${{BASE}}
# A number, so that Kubernetes can check that it is not root.
ARG UID={USER}
RUN useradd --create-home --non-unique --uid "${{UID}}" train \\
 && install -d -o train -g train {request.run_folder or RUN_FOLDER}
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR {WORKSPACE}
COPY . .
USER ${{UID}}
# One node. compose.yaml and the files of `paceline job k8s` have commands of their own.
CMD {command}
"""


def _log_dir(request: JobRequest) -> str:
    """The option for reports of failures, which outlive the container in the run folder."""
    return f"--log-dir={request.run_folder or RUN_FOLDER}"


def _install_steps(options: argparse.Namespace) -> str:
    words, files = _install(options)
    pip = 'pip install --extra-index-url "${TORCH_INDEX}"'
    first = ""
    if files == ["."] and "constraints.txt" in words:
        first = f"""# First, so that a change of the project does not install torch again.
COPY constraints.txt ./
RUN {pip} -c constraints.txt torch
"""
    copy = f"COPY {' '.join(files)} ./\n" if files else ""
    return f"{first}{copy}RUN {pip} {shlex.join(words)}\n"


def _compose(
    request: JobRequest, options: argparse.Namespace, name: str, image: str, folder: str
) -> dict[str, Any]:
    nodes = {
        f"node-{node}": _service(request, options, image, folder, node)
        for node in range(request.nodes)
    }
    return {
        "name": name,
        "services": nodes,
        "volumes": Commented(
            {"runs": {}}, "Outlives the containers: a job that is started again resumes."
        ),
    }


def _service(
    request: JobRequest, options: argparse.Namespace, image: str, folder: str, node: int
) -> dict[str, Any]:
    launch = [_log_dir(request)]
    if request.nodes > 1:
        launch += [
            f"--nnodes={request.nodes}",
            f"--node-rank={node}",
            f"--host=node-0:{PORT}",
        ]
    # Compose replaces $NAME in all values.
    command = [word.replace("$", "$$") for word in request.command(*launch)]
    variables: dict[str, str | None] = {SHUTDOWN_TIMEOUT: str(request.grace_s)}
    variables |= {key: value.replace("$", "$$") for key, value in request.variables.items()}
    variables |= dict.fromkeys(request.secrets)
    resources = _resources(request, node)
    return {
        "image": image,
        "build": {
            "context": os.path.relpath(".", folder),
            "dockerfile": os.path.normpath(os.path.join(folder, "Dockerfile")),
            **({"args": {"TORCH_INDEX": _TORCH_CUDA}} if request.gpus else {}),
        },
        "hostname": f"node-{node}",
        "command": command,
        "environment": variables,
        "shm_size": f"{request.shm_mib(options.shm_size)}m",
        "stop_grace_period": Commented(
            f"{request.scheduler_grace_s}s", "Time for a step, a save, and the end of the launcher."
        ),
        "init": Commented(True, "A first process that reaps the others."),
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "volumes": [f"runs:{request.run_folder or RUN_FOLDER}"],
        **({"deploy": {"resources": resources}} if resources else {}),
    }


def _resources(request: JobRequest, node: int) -> dict[str, Any]:
    limits = {}
    if request.cpus is not None:
        limits["cpus"] = str(request.cpus)
    if request.memory_mib is not None:
        limits["memory"] = f"{request.memory_mib}m"
    resources: dict[str, Any] = {"limits": limits} if limits else {}
    if request.gpus:
        first = node * request.gpus
        ids = [str(first + gpu) for gpu in range(request.gpus)]
        device = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
        resources["reservations"] = {"devices": [device]}
    return resources
