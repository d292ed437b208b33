"""What Slurm tells a task of `srun`: the place of a node or of a rank. The environment is an argument.

A step has either one task for each node, which is `paceline run` and starts the ranks of the node, or one
task for each rank, which is the script. `TRUTH_TABLE` says what a process is, as docs/howto/slurm.md does.

Source: the manual page of srun, and the variables of Slurm 22.05.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from paceline.errors import ConfigError

PORTS = (29500, 29550)
# All of these are set in a step. Some are set in the script of `sbatch` too.
NEEDED = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_JOB_ID")
# Slurm numbers the steps of shells (salloc, sbatch) from the top; they are not parallel tasks.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_MAX_NODES = 1 << 16  # in one range of a node list; Slurm's own limit is lower


class Situation(Enum):
    """What the variables say about a process. The values are the words of the documentation."""

    NO_STEP = "a shell of `salloc` or `srun --pty`, or the script of `sbatch`"
    TASK_PER_NODE = "a step with one task on each node"
    TASKS_PER_NODE = "a step with several tasks on a node"
    HETEROGENEOUS = "a step of several components (`srun A : B`)"


class Meaning(Enum):
    """What a process is in the job. The values are the words of the documentation."""

    ALONE = "a job of its own"
    NODE = "a node of the job"
    RANK = "a rank of the job"
    REFUSED = "refused"


# For each situation, what `paceline run` is, and what a script is that it did not start.
TRUTH_TABLE: Mapping[Situation, tuple[Meaning, Meaning]] = {
    Situation.NO_STEP: (Meaning.ALONE, Meaning.ALONE),
    Situation.TASK_PER_NODE: (Meaning.NODE, Meaning.RANK),
    Situation.TASKS_PER_NODE: (Meaning.REFUSED, Meaning.RANK),
    Situation.HETEROGENEOUS: (Meaning.REFUSED, Meaning.REFUSED),
}


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """The place of a task in its step.

    Attributes:
        tasks: number of tasks on each node.
        node_rank: index of this node in `tasks`.
        rank: index of this task in the step.
        local_rank: index of this task on its node.
        endpoint: "host:port" at which the tasks meet: the first node, and a port that all tasks compute.
        key: identifies the job and the step. Each task of an array is a job.
        restarts: how often Slurm has queued the job again.
    """

    tasks: tuple[int, ...]
    node_rank: int
    rank: int
    local_rank: int
    endpoint: str
    key: str
    restarts: int


def situation(environ: Mapping[str, str]) -> Situation:
    """The row of `TRUTH_TABLE` for a process with these variables.

    Raises:
        ConfigError: a variable cannot be read.
    """
    step = environ.get("SLURM_STEP_ID", "")
    in_step = all(name in environ for name in NEEDED) and step.isdigit()
    if not in_step or int(step) >= _FIRST_SPECIAL_STEP or _is_typed(environ):
        return Situation.NO_STEP
    if "SLURM_HET_SIZE" in environ:
        return Situation.HETEROGENEOUS
    one_each = all(count == 1 for count in _tasks(environ))
    return Situation.TASK_PER_NODE if one_each else Situation.TASKS_PER_NODE


def _is_typed(environ: Mapping[str, str]) -> bool:
    """Whether a shell of `srun --pty` started this process.

    The shell is the first task of its step, and the others have ended. A program that `srun --pty` starts
    itself is a task as usual.
    """
    is_first = "SLURM_PTY_PORT" in environ and environ["SLURM_PROCID"] == "0"
    return is_first and environ.get("SLURM_TASK_PID") != str(os.getpid())


def read_node(environ: Mapping[str, str]) -> SlurmStep | None:
    """The place of a launcher; None if it is no task of a step, so that its job has one node.

    Raises:
        ConfigError: srun has started several launchers on a node, or the variables are contradictory.
    """
    found = situation(environ)
    meaning = TRUTH_TABLE[found][0]
    if meaning is Meaning.REFUSED:
        _refuse_heterogeneous(found)
        tasks = _tasks(environ)
        raise ConfigError(
            f"srun has started {sum(tasks)} launchers on {_nodes(len(tasks))}.",
            where=f"Slurm job {environ['SLURM_JOB_ID']}, step {environ['SLURM_STEP_ID']}",
            why="`paceline run` is started once on each node, and starts the ranks of the node itself. An "
            "`salloc` or `sbatch` around it may have set SLURM_NTASKS_PER_NODE or SLURM_NTASKS, which srun "
            "reads.",
            fix=f"`#SBATCH --nodes={len(tasks)}`, `#SBATCH --ntasks-per-node=1`, and `srun "
            f"--ntasks-per-node=1 paceline run --nproc-per-node={max(tasks)} ...`; or a task for each rank, "
            "without the launcher: `srun python train.py`. For a job of its own in each task, add "
            "--standalone.",
            variables=["SLURM_STEP_TASKS_PER_NODE"],
        )
    return _step(environ) if meaning is Meaning.NODE else None


def read_rank(environ: Mapping[str, str]) -> SlurmStep | None:
    """The place of a script that srun has started; None if it is no task of a step.

    Raises:
        ConfigError: a heterogeneous step, or contradictory variables.
    """
    found = situation(environ)
    _refuse_heterogeneous(found)
    return _step(environ) if TRUTH_TABLE[found][1] is Meaning.RANK else None


def unused_nodes(environ: Mapping[str, str]) -> int:
    """How many nodes of the job a launcher leaves idle, because srun did not start it."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    if situation(environ) is not Situation.NO_STEP or not nodes.isdigit():
        return 0
    return max(0, int(nodes) - 1)


def expand_nodes(text: str) -> list[str]:
    """Expand a node list of Slurm: "a[1-3,07]b[1-2],c" gives a1b1, a1b2, a2b1, ..., a07b2, c.

    Raises:
        ConfigError: the list is empty, or cannot be read.
    """
    names = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    try:
        nodes = [node for name in names for node in _expand_name(name)]
    except ValueError:
        nodes = []
    if not nodes or ",".join(names) != text:
        raise ConfigError(
            f"SLURM_STEP_NODELIST={text!r} is no list of nodes.",
            fix="unset it if you set it; srun sets it in each step.",
            variables=["SLURM_STEP_NODELIST"],
        )
    return nodes


def _expand_name(name: str) -> Iterator[str]:
    head, bracket, tail = name.partition("[")
    if not bracket:
        yield name
        return
    inside, _, rest = tail.partition("]")
    for part in inside.split(","):
        low, dash, high = part.partition("-")
        first, last = int(low), int(high if dash else low)
        if not 0 <= last - first < _MAX_NODES:
            raise ValueError(part)
        for number in range(first, last + 1):
            for end in _expand_name(rest) if rest else [""]:
                yield f"{head}{number:0{len(low)}d}{end}"


def _step(environ: Mapping[str, str]) -> SlurmStep:
    tasks = _tasks(environ)
    size, node_rank = _number(environ, "SLURM_STEP_NUM_TASKS"), _number(environ, "SLURM_NODEID", 0)
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", len(tasks))
    if not node_rank < len(tasks) == nodes or sum(tasks) != size:
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE={environ.get('SLURM_STEP_TASKS_PER_NODE')!r} does not fit "
            f"SLURM_STEP_NUM_TASKS={size}, SLURM_STEP_NUM_NODES={nodes} and SLURM_NODEID={node_rank}.",
            why="some of them are those of another step, of a shell, or were set by a script.",
            fix="start with srun, and export none of them.",
            variables=["SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID"],
        )
    job, step = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID")
    host = "localhost"
    if nodes > 1 or "SLURM_STEP_NODELIST" in environ:
        names = expand_nodes(environ.get("SLURM_STEP_NODELIST", ""))
        host = names[0]
        if len(names) != nodes:
            raise ConfigError(
                f"SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']!r} has {_nodes(len(names))}, and "
                f"the step has {nodes}.",
                why="it is that of another step, or a script has set it.",
                fix="start with srun, and do not export it.",
                variables=["SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES"],
            )
    low, high = PORTS
    return SlurmStep(
        tasks=tasks,
        node_rank=node_rank,
        rank=_number(environ, "SLURM_PROCID"),
        local_rank=_number(environ, "SLURM_LOCALID"),
        # All tasks must compute the same port without communication.
        endpoint=f"{host}:{low + (job * 31 + step) % (high - low + 1)}",
        key=f"slurm-{job}-{step}",
        restarts=_number(environ, "SLURM_RESTART_COUNT", 0),
    )


def _tasks(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Expand Slurm's "2(x3),1" to (2, 2, 2, 1)."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = environ.get(name, environ["SLURM_STEP_NUM_TASKS"])
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise ConfigError(
                f"{name}={text!r} cannot be read.",
                fix="unset it if you set it; srun sets it in each step.",
                variables=[name],
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return tuple(counts)


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdigit():
        raise ConfigError(f"{name}={text!r} is not a whole number.", variables=[name])
    return int(text)


def _refuse_heterogeneous(found: Situation) -> None:
    if found is Situation.HETEROGENEOUS:
        raise ConfigError(
            "this is a step of a heterogeneous Slurm job.",
            why="its components may have other nodes and GPUs, and all ranks need the same ones.",
            fix="use one kind of node: `#SBATCH --nodes=N` without `#SBATCH hetjob`, and `srun` without `:`.",
            variables=["SLURM_HET_SIZE"],
        )


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
