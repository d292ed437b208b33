"""The files of `paceline job`: which template each scheduler fills with which values.

`{{value}}` in a template stands for a value. Values that a user typed are either checked (names, images,
folders) or quoted (the script and its arguments): `shlex.join` for a shell, `_json_words` for YAML and for
CMD of a Dockerfile, because a list in JSON is also one there. All words are printable (`cli/job.py`).

Sources: the manual pages of sbatch and srun (Slurm 22.05); the Kubernetes API reference (batch/v1 Job,
podFailurePolicy; core/v1 Pod), jobset.x-k8s.io/v1alpha2 and trainer.kubeflow.org/v1alpha1; the Dockerfile
reference and the Compose specification.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import paceline
from paceline.errors import ConfigError
from paceline.exit_codes import ExitCode

KINDS = ("job", "jobset", "trainjob")

_TEMPLATES = Path(__file__).with_name("templates")
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_MAX_GPUS = 16
# The launcher kills ranks that have not saved in time. It then still has to report, and to end.
_LAUNCHER_MARGIN_S = 15
_SHM_MIB_PER_RANK = 2048
_PORT = 29400
# How long a pod waits for the others, which may still be pending or pull their image.
_JOIN_TIMEOUT_S = 1800
_DNS_LABEL = 63
_INSTALL_TORCH = """\
# First, so that a change of the project does not install torch again.
COPY constraints.txt ./
RUN pip install --extra-index-url "${TORCH_INDEX}" -c constraints.txt torch"""
_CONTAINER_FOLDERS = ("/workspace", "/opt/venv", "/dev/shm")
_DEFAULT_RUN_FOLDER = "/workspace/runs"


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """What a user asks for. All amounts are per node.

    Args:
        script: The script and its arguments, or "-m", a module's name and its arguments.
        name: Name of the job; empty for that of the script.
        gpus: GPUs of a node; 0 trains on CPU.
        ranks: Ranks of a node; None for one for each GPU, or 1.
        cpus: Cores of a node; None is one for each rank under Slurm, and no limit elsewhere.
        memory: Memory of a node, such as "64G"; None for the scheduler's default.
        time_s: The longest time that the job may run; None for no limit.
        grace_s: Time for a step and a save after the notice of a preemption.
        run_folder: Where the script writes checkpoints and logs; empty for the scheduler's default.
    """

    script: Sequence[str]
    name: str = ""
    nodes: int = 1
    gpus: int = 0
    ranks: int | None = None
    cpus: int | None = None
    memory: str | None = None
    time_s: int | None = None
    grace_s: int = 120
    run_folder: str = ""

    def check(self) -> None:
        """Refuse what cannot work with any scheduler.

        Raises:
            ConfigError: it cannot.
        """
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
        if self.time_s is not None and self.time_s <= self.signal_s:
            raise ConfigError(
                f"--time is {self.time_s} s, and a job needs more than {self.signal_s} s.",
                why=f"--grace keeps {self.grace_s} s for the last save, and the launcher needs "
                f"{_LAUNCHER_MARGIN_S} s to end.",
                fix="give more --time or less --grace.",
            )

    @property
    def ranks_per_node(self) -> int:
        """Ranks of a node."""
        return self.ranks if self.ranks is not None else max(1, self.gpus)

    @property
    def signal_s(self) -> int:
        """Seconds between the scheduler's SIGTERM and its SIGKILL; the launcher's own limit ends before."""
        return self.grace_s + _LAUNCHER_MARGIN_S

    def job_name(self, pattern: str, rule: str, longest: int = 128) -> str:
        """The given name, or that of the script in lower-case letters, digits and hyphens.

        Raises:
            ConfigError: it does not fit the pattern of the scheduler, or is too long.
        """
        is_module = self.script[0] == "-m"
        stem = (
            self.script[1].rpartition(".")[2] if is_module else PurePosixPath(self.script[0]).stem
        )
        name = self.name or re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
        if not re.fullmatch(pattern, name) or len(name) > longest:
            raise ConfigError(
                f"{'--name' if self.name else 'the name of the script'} {name!r} is not a valid name.",
                why=f"a name has {rule}, and at most {longest} characters here.",
                fix="give another --name.",
            )
        return name

    def command(self, run_folder: str, *launch: str) -> list[str]:
        """The words of `paceline run`. Reports of failures go to the run folder, which outlives a node."""
        ours = [f"--log-dir={run_folder}", *launch, f"--nproc-per-node={self.ranks_per_node}"]
        return ["paceline", "run", *ours, "--max-restarts=3", *self.script]

    def common_values(self) -> dict[str, object]:
        """The values that all templates have."""
        return {"nodes": self.nodes, "grace_s": self.grace_s, "signal_s": self.signal_s}

    def container_values(self) -> dict[str, object]:
        """The values that all templates of containers have.

        Raises:
            ConfigError: the script is not in an image of this folder, or a volume cannot be mounted at the
                run folder.
        """
        if os.path.normpath(self.script[0]).split("/")[0] == "..":
            raise ConfigError(
                f"{self.script[0]!r} is outside of this folder, so an image of this folder does not have it.",
                fix="go to the folder of the project, or give its absolute path in the image.",
            )
        folder = self.run_folder or _DEFAULT_RUN_FOLDER
        is_plain = re.fullmatch(r"(/[\w.-]+)+", folder) and os.path.normpath(folder) == folder
        hides = [used for used in _CONTAINER_FOLDERS if f"{used}/".startswith(f"{folder}/")]
        inside = [used for used in _CONTAINER_FOLDERS[1:] if folder.startswith(f"{used}/")]
        if not is_plain or hides or inside:
            raise ConfigError(
                f"--run-folder is {folder!r}, and a volume cannot be mounted there.",
                why="".join(
                    f"the container has other files in {u}." for u in (*hides, *inside)[:1]
                ),
                fix=f"give an absolute path in the container, such as --run-folder {_DEFAULT_RUN_FOLDER}.",
            )
        sizes = {"cpus": self.cpus, "shm_mib": _SHM_MIB_PER_RANK * self.ranks_per_node}
        return self.common_values() | sizes | {"run_folder": folder}


@dataclass(frozen=True)
class JobFiles:
    """The files of a job.

    Args:
        files: Text of each file by its name.
        next_steps: What to do with them: lines that the command prints.
    """

    files: Mapping[str, str]
    next_steps: Sequence[str]


def slurm(request: JobRequest, output: str) -> JobFiles:
    """The batch script, to be written to the folder `output`.

    Raises:
        ConfigError: a name or folder that sbatch refuses.
    """
    name = request.job_name(
        r"[A-Za-z0-9_][\w.-]*", "letters, digits, dots, hyphens and underscores"
    )
    folder = request.run_folder
    # sbatch reads no quotes in its lines, and replaces % in the path of the output.
    if folder and not re.fullmatch(r"[\w./+-]+", folder, re.ASCII):
        raise ConfigError(
            f"--run-folder is {folder!r}, and sbatch cannot write its output there.",
            fix="give a path of letters, digits, dots, hyphens, plus signs and underscores.",
        )
    beside = f"{folder.rstrip('/')}/" if folder else ""
    values = request.common_values() | {
        "name": name,
        "cpus": request.cpus or request.ranks_per_node,
        "gpus": request.gpus or None,
        "memory": request.memory,
        "time": None if request.time_s is None else _slurm_time(request.time_s),
        "output": f"{beside}%x-%j.out",
        "command": shlex.join(request.command(folder or ".")),
        "preempted": int(ExitCode.PREEMPTED),
        "unavailable": int(ExitCode.UNAVAILABLE),
    }
    steps = [
        f"sbatch {shlex.quote(os.path.join(output, f'{name}.slurm'))}",
        f"tail -F {beside}{name}-JOBID.out    # the output; sbatch prints JOBID",
    ]
    if folder:
        steps.insert(0, f"mkdir -p {folder}    # sbatch does not create it")
    return JobFiles({f"{name}.slurm": _fill("job.slurm", values)}, steps)


def _slurm_time(seconds: int) -> str:
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def k8s(request: JobRequest, output: str, *, image: str, kind: str) -> JobFiles:
    """An Indexed Job with a headless Service, a JobSet, or a TrainJob; and the claim of the run folder.

    Raises:
        ConfigError: names, images or folders that Kubernetes refuses.
    """
    # The name of the last pod is a host name; Kubernetes adds a hyphen and 5 letters to that of a JobSet.
    last = f"-{request.nodes - 1}" if kind == "job" else f"-node-0-{request.nodes - 1}-abcde"
    rule = "lower-case letters, digits and hyphens; the first is a letter, and the last is not a hyphen"
    name = request.job_name(r"[a-z]([-a-z0-9]*[a-z0-9])?", rule, _DNS_LABEL - len(last))
    values = request.container_values()
    rendezvous = [
        f"--nnodes={request.nodes}",
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        f"--host={name}-0.{name}:{_PORT}"
        if kind == "job"
        else f"--host={name}-node-0-0.{name}:{_PORT}",
        f"--rdzv-conf=join_timeout={_JOIN_TIMEOUT_S}",
    ]
    command = request.command(str(values["run_folder"]), *(rendezvous if request.nodes > 1 else []))
    # Kubernetes replaces $(NAME) in the words of the script, unless it is written $$(NAME).
    ours = len(command) - len(request.script)
    command[ours:] = [word.replace("$(", "$$(") for word in command[ours:]]
    is_job = kind == "job"
    values |= {
        "name": name,
        "image": _checked_image(image),
        "subdomain": name if is_job else None,  # a JobSet sets its own
        "memory": request.memory and f"{request.memory}i",
        "gpus": request.gpus,
        "time_s": request.time_s,
        "command": _yaml_list(command),
        "access": "ReadWriteMany" if request.nodes > 1 else "ReadWriteOnce",
        "backoff": request.nodes if is_job else 0,
        "backoff_note": "pods that may fail; a failure ends all pods, and each of them counts"
        if is_job
        else "the failurePolicy above starts all pods again",
    }
    for part in ("pod", "job_spec", "jobset_spec"):
        values[part] = _fill(f"{part}.yaml", values)
    file, claim = f"{name}.k8s.yaml", f"{name}-runs.k8s.yaml"
    label = "batch.kubernetes.io/job-name" if is_job else "jobset.sigs.k8s.io/jobset-name"
    steps = [
        f"kubectl apply -f {_path(output, claim)}    # once; deleting it deletes the checkpoints",
        f"kubectl apply -f {_path(output, file)}",
        f"kubectl logs -f -l {label}={name} --prefix --max-log-requests {request.nodes}",
    ]
    return JobFiles(
        {claim: _fill("claim.yaml", values), file: _fill(f"{kind}.yaml", values)}, steps
    )


def docker(request: JobRequest, output: str) -> JobFiles:
    """A Dockerfile for the project of this folder, and a Compose file with one service for each node.

    Raises:
        ConfigError: names or folders that Docker refuses.
    """
    rule = "lower-case letters, digits and hyphens; the first and the last are not hyphens"
    name = request.job_name(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", rule)
    values = request.container_values()
    run_folder = str(values["run_folder"])
    folder = os.path.relpath(output)
    dockerfile = os.path.normpath(os.path.join(folder, "Dockerfile"))
    file = os.path.normpath(os.path.join(folder, "compose.yaml"))
    constraints = ["-c", "constraints.txt"] if os.path.exists("constraints.txt") else []
    project = (
        ["-r", "requirements.txt"]
        if os.path.exists("requirements.txt")
        else ["."]
        if os.path.exists("pyproject.toml")
        else []
    )
    values |= {
        "name": name,
        "install_torch": _INSTALL_TORCH if constraints else None,
        "install": " ".join([*constraints, f"paceline=={paceline.__version__}", *project]),
        "compose": "docker compose" + ("" if folder == "." else f" -f {shlex.quote(file)}"),
        "torch": "cu130" if request.gpus else "cpu",
        "memory": request.memory and request.memory.lower(),
        "services": "".join(_service(request, run_folder, n) for n in range(request.nodes)),
    }
    # Paths are quoted for a shell in the Dockerfile, which has them in comments, and for YAML otherwise.
    values |= {"context": json.dumps(os.path.relpath(".", folder)), "dockerfile": dockerfile}
    files = {
        "Dockerfile": _fill(
            "Dockerfile",
            values
            | {
                "dockerfile": shlex.quote(dockerfile),
                "command": f"[{_json_words(request.command(run_folder))}]",
            },
        ),
        "Dockerfile.dockerignore": _fill("Dockerfile.dockerignore", {}),
        "compose.yaml": _fill("compose.yaml", values | {"dockerfile": json.dumps(dockerfile)}),
    }
    steps = [
        f"{values['compose']} up --build",
        f"{values['compose']} stop    # a training saves, and exits with 75",
    ]
    return JobFiles(files, steps)


def _service(request: JobRequest, run_folder: str, node: int) -> str:
    launch = [f"--nnodes={request.nodes}", f"--node-rank={node}", f"--host=node-0:{_PORT}"]
    command = request.command(run_folder, *(launch if request.nodes > 1 else []))
    gpus = range(node * request.gpus, (node + 1) * request.gpus)
    return _fill(
        "compose_node.yaml",
        {
            "node": node,
            # Compose replaces $NAME in all values.
            "command": _yaml_list([word.replace("$", "$$") for word in command]),
            "devices": _json_words([str(gpu) for gpu in gpus]) or None,
        },
    )


def _fill(template: str, values: Mapping[str, object]) -> str:
    """The text of a template with its values.

    A line with a value of None is left out. All lines of a value are indented like its placeholder.
    """
    text = (_TEMPLATES / template).read_text(encoding="utf-8")
    lines = [_fill_line(line, values) for line in text.splitlines()]
    return "".join(f"{line}\n" for line in lines if line is not None)


def _fill_line(line: str, values: Mapping[str, object]) -> str | None:
    if any(values[name] is None for name in _PLACEHOLDER.findall(line)):
        return None
    indent = " " * (len(line) - len(line.lstrip()))

    def text(found: re.Match[str]) -> str:
        return str(values[found[1]]).rstrip("\n").replace("\n", f"\n{indent}")

    return _PLACEHOLDER.sub(text, line)


def _json_words(words: Sequence[str]) -> str:
    """Words as they are written in a list of JSON or YAML."""
    return ", ".join(json.dumps(word, ensure_ascii=False) for word in words)


def _yaml_list(words: Sequence[str]) -> str:
    return "\n".join(f"- {_json_words([word])}" for word in words)


def _path(folder: str, name: str) -> str:
    return shlex.quote(os.path.join(folder, name))


def _checked_image(image: str) -> str:
    component = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
    host = r"(?:(?:localhost|[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+|[A-Za-z0-9.-]+(?=:\d+/))(?::\d+)?/)?"
    ending = r"(?::[\w][\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
    if not re.fullmatch(rf"{host}{component}(?:/{component})*{ending}", image, re.ASCII):
        raise ConfigError(
            f"--image {image!r} is not a valid image name.",
            fix="give REGISTRY/NAME:TAG, such as registry.example/me/train:1.",
        )
    return image
