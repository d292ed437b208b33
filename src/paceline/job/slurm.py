"""What Slurm tells a task of `srun`: the place of a node or of a rank. The environment is an argument.

A step has either one task for each node, which is `paceline run` and starts the ranks of the node, or one
task for each rank, which is the script.

Source: the manual page of srun, and the variables of Slurm 22.05.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import ConfigError

PORTS = (29500, 29550)
# All of these are set in a step. Some are set in the script of `sbatch` too.
NEEDED = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_JOB_ID")
# Slurm numbers the steps of shells (salloc, sbatch) from the top; they are not parallel tasks.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """The place of a task in its step.

    Attributes:
        tasks: number of tasks on each node.
        node_rank: index of this node in `tasks`.
        rank: index of this task in the step.
        local_rank: index of this task on its node.
        endpoint: "host:port" of the rendezvous: the first node, and a port that all tasks compute.
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


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether a process with these variables is a task of a step.

    A shell of `salloc` or `srun --pty`, and the script of `sbatch`, are not tasks.
    """
    step = environ.get("SLURM_STEP_ID", "")
    has_all = all(name in environ for name in NEEDED) and step.isdigit()
    return has_all and int(step) < _FIRST_SPECIAL_STEP and not is_pty_shell(environ)


def is_pty_shell(environ: Mapping[str, str]) -> bool:
    """Whether a shell of `srun --pty` started this process.

    The shell is the first task of its step, and the others have ended. A program that `srun --pty` starts
    itself is a task as usual.
    """
    is_first = "SLURM_PTY_PORT" in environ and environ.get("SLURM_PROCID") == "0"
    return is_first and environ.get("SLURM_TASK_PID") != str(os.getpid())


def read_node(environ: Mapping[str, str]) -> SlurmStep | None:
    """The place of a launcher; None if it is no task of a step, so that its job has one node.

    Raises:
        ConfigError: srun has started several launchers on a node, or the variables are contradictory.
    """
    if not in_step(environ):
        return None
    _refuse_heterogeneous(environ)
    tasks = _tasks(environ)
    if max(tasks) > 1:
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
    return _step(environ)


def read_rank(environ: Mapping[str, str]) -> SlurmStep | None:
    """The place of a script that srun has started; None if it is no task of a step.

    Raises:
        ConfigError: a heterogeneous step, or contradictory variables.
    """
    if not in_step(environ):
        return None
    _refuse_heterogeneous(environ)
    return _step(environ)


def unused_nodes(environ: Mapping[str, str]) -> int:
    """How many nodes of the job a launcher leaves idle, because srun did not start it."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    return max(0, int(nodes) - 1) if nodes.isdigit() and not in_step(environ) else 0


def first_host(nodes: str) -> str:
    """The first host of a node list of Slurm: "a[01-03]b[2,5],c" gives a01b2.

    Raises:
        ConfigError: the list has no such form.
    """
    name = re.match(r"(?:[^,\[\]]|\[\d[^\[\]]*\])+", nodes)
    if name is None:
        raise ConfigError(
            f"SLURM_STEP_NODELIST={nodes!r} is no list of nodes.",
            fix="unset it if you set it; srun sets it in each step.",
            variables=["SLURM_STEP_NODELIST"],
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", name[0])


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
        host = first_host(environ.get("SLURM_STEP_NODELIST", ""))
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


def _refuse_heterogeneous(environ: Mapping[str, str]) -> None:
    if "SLURM_HET_SIZE" in environ:
        raise ConfigError(
            "this is a step of a heterogeneous Slurm job.",
            why="its components may have other nodes and GPUs, and all ranks need the same ones.",
            fix="use one kind of node: `#SBATCH --nodes=N` without `#SBATCH hetjob`, and `srun` without `:`.",
            variables=["SLURM_HET_SIZE"],
        )


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
