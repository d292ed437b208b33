"""Variables of Slurm 22.05, recorded on a real cluster of two nodes: the truth table, and contradictions."""

from __future__ import annotations

import os
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.job import environment, slurm
from paceline.job.slurm import first_host
from paceline.launch.options import read_options


def _variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


# srun -N2 --ntasks-per-node=1, the second task
PER_NODE = _variables(
    "SLURM_JOBID=1 SLURM_JOB_ID=1 SLURM_JOB_NODELIST=n[1-2] SLURM_JOB_NUM_NODES=2 SLURM_LOCALID=0 "
    "SLURM_NNODES=2 SLURM_NODEID=1 SLURM_NODELIST=n[1-2] SLURM_NPROCS=2 SLURM_NTASKS=2 "
    "SLURM_NTASKS_PER_NODE=1 SLURM_PROCID=1 SLURM_STEPID=0 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-2] "
    "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2) "
    "SLURM_TASKS_PER_NODE=1(x2)"
)
# srun -N2 -n3, the third task
PER_RANK = _variables(
    "SLURM_JOBID=2 SLURM_JOB_ID=2 SLURM_JOB_NODELIST=n[1-2] SLURM_JOB_NUM_NODES=2 SLURM_LOCALID=0 "
    "SLURM_NNODES=2 SLURM_NODEID=1 SLURM_NODELIST=n[1-2] SLURM_NPROCS=3 SLURM_NTASKS=3 SLURM_PROCID=2 "
    "SLURM_STEPID=0 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_NODES=2 "
    "SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=2,1 SLURM_TASKS_PER_NODE=2,1"
)
# The script of `sbatch -N 2 --ntasks-per-node=1 --array=3-4`, its second task
BATCH = _variables(
    "SLURM_ARRAY_JOB_ID=3 SLURM_ARRAY_TASK_COUNT=2 SLURM_ARRAY_TASK_ID=4 SLURM_GTIDS=0 SLURM_JOBID=3 "
    "SLURM_JOB_ID=3 SLURM_JOB_NODELIST=n[1-2] SLURM_JOB_NUM_NODES=2 SLURM_LOCALID=0 SLURM_NNODES=2 "
    "SLURM_NODEID=0 SLURM_NPROCS=2 SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=1 SLURM_PROCID=0 "
    "SLURM_TASKS_PER_NODE=1(x2)"
)
# salloc -N2 -n4
SALLOC = _variables(
    "SLURM_JOBID=7 SLURM_JOB_CPUS_PER_NODE=3,1 SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n[1-2] "
    "SLURM_JOB_NUM_NODES=2 SLURM_NNODES=2 SLURM_NPROCS=4 SLURM_NTASKS=4 SLURM_TASKS_PER_NODE=3,1"
)
# `srun -n1 -N1` in that shell
SALLOC_STEP = SALLOC | _variables(
    "SLURM_LOCALID=0 SLURM_NNODES=1 SLURM_NODEID=0 SLURM_NODELIST=n[1-2] SLURM_NPROCS=1 SLURM_NTASKS=1 "
    "SLURM_PROCID=0 SLURM_STEPID=0 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n1 SLURM_STEP_NUM_NODES=1 "
    "SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 SLURM_TASKS_PER_NODE=1"
)
# `srun --interactive` in that shell
INTERACTIVE = SALLOC_STEP | {"SLURM_STEPID": "4294967290", "SLURM_STEP_ID": "4294967290"}
# What a shell of `srun -N1 -n2 --pty bash` starts
PTY = SALLOC_STEP | _variables(
    "SLURM_PTY_PORT=40000 SLURM_PTY_WIN_COL=80 SLURM_PTY_WIN_ROW=24 SLURM_STEP_NUM_TASKS=2 "
    "SLURM_STEP_TASKS_PER_NODE=2 SLURM_TASK_PID=1"
)
# srun -N1 -n1 : -N1 -n1, the second task
HETEROGENEOUS = _variables(
    "SLURM_HET_SIZE=2 SLURM_JOBID=5 SLURM_JOB_ID=5 SLURM_JOB_NODELIST=n[1-2] SLURM_JOB_NUM_NODES=2 "
    "SLURM_LOCALID=0 SLURM_NNODES=2 SLURM_NODEID=1 SLURM_NTASKS=2 SLURM_PACK_SIZE=2 SLURM_PROCID=1 "
    "SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 "
    "SLURM_STEP_TASKS_PER_NODE=1(x2)"
)
# What `paceline run` is, and a script that it did not start: alone, a node, a rank, or refused.
MEANINGS: list[tuple[str, str, dict[str, str]]] = [
    ("part", "part", PER_NODE),
    ("part", "part", SALLOC_STEP),
    ("refused", "part", PER_RANK),
    ("alone", "alone", {}),
    ("alone", "alone", BATCH),
    ("alone", "alone", SALLOC),
    ("alone", "alone", INTERACTIVE),
    ("alone", "alone", PTY),
    ("refused", "part", PTY | {"SLURM_TASK_PID": str(os.getpid())}),
    ("refused", "refused", HETEROGENEOUS),
]


def _meaning(read: Any, variables: dict[str, str]) -> str:
    try:
        return "alone" if read(variables) is None else "part"
    except ConfigError:
        return "refused"


@pytest.mark.parametrize(("launcher", "script", "variables"), MEANINGS)
def test_what_a_process_is(launcher: str, script: str, variables: dict[str, str]) -> None:
    assert _meaning(slurm.read_node, variables) == launcher
    assert _meaning(slurm.read_rank, variables) == script


def test_a_program_in_a_shell_of_srun_with_pmi_is_alone() -> None:
    variables = PTY | {"PMI_RANK": "0", "PMI_SIZE": "2"}  # MpiDefault=pmi2
    assert environment.read(variables).launcher == "none"


def test_a_rank() -> None:
    info = environment.read(PER_RANK)
    assert (info.launcher, info.rank, info.world_size) == ("slurm", 2, 3)
    assert (info.local_rank, info.local_world_size, info.restarts) == (0, 1, 0)
    assert info.master == "n1:29511"
    assert environment.read({**PER_RANK, "SLURM_RESTART_COUNT": "2"}).restarts == 2
    own = {"MASTER_ADDR": "a", "MASTER_PORT": "4"}
    assert environment.read(PER_RANK | own).master == "a:4"


def test_jobs_with_near_numbers_do_not_meet() -> None:
    """The tasks of an array have numbers of jobs that follow each other."""
    steps = [slurm.read_rank({**PER_RANK, "SLURM_JOB_ID": str(job)}) for job in range(100, 150)]
    assert len({step.endpoint for step in steps if step}) == 50
    assert len({step.key for step in steps if step}) == 50


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in PER_NODE.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_launcher_takes_nodes_rank_and_host_from_the_step(step: pytest.MonkeyPatch) -> None:
    options = read_options(["--nproc-per-node=2", "train.py"])
    assert (options.min_nodes, options.max_nodes) == (2, 2)
    assert options.node_rank == 1
    assert str(options.endpoint) == "n1:29531"
    assert options.run_id == "slurm-1-0"
    assert options.notes == ("Slurm step of 2 nodes: --nnodes=2 --host=n1:29531",)


def test_options_of_the_user_win(step: pytest.MonkeyPatch) -> None:
    options = read_options(["--nnodes=2", "--host=m:4", "--node-rank=0", "train.py"])
    assert (str(options.endpoint), options.node_rank, options.notes) == ("m:4", 0, ())
    assert read_options(["--standalone", "train.py"]).max_nodes == 1
    step.setenv("SLURM_STEP_TASKS_PER_NODE", "2(x2)")
    step.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert read_options(["--standalone", "train.py"]).max_nodes == 1


def test_several_launchers_on_a_node_are_refused_with_the_right_lines(
    step: pytest.MonkeyPatch,
) -> None:
    step.setenv("SLURM_STEP_TASKS_PER_NODE", "4(x2)")
    step.setenv("SLURM_STEP_NUM_TASKS", "8")
    with pytest.raises(ConfigError, match="8 launchers on 2 nodes") as caught:
        read_options(["train.py"])
    for line in ("--nodes=2", "--ntasks-per-node=1"):
        assert f"`#SBATCH {line}`" in caught.value.fix
    assert "--nproc-per-node=4" in caught.value.fix


def test_idle_nodes_of_an_allocation_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in BATCH.items():
        monkeypatch.setenv(name, value)
    (note,) = read_options(["train.py"]).notes
    assert note.startswith("1 node of this Slurm job is not used: ")


def test_heterogeneous_steps_are_refused_with_the_right_lines() -> None:
    for read in (slurm.read_node, environment.read):
        with pytest.raises(ConfigError, match="heterogeneous") as caught:
            read(HETEROGENEOUS)
        assert caught.value.variables == ["SLURM_HET_SIZE"]
        assert "`#SBATCH --nodes=N`" in caught.value.fix


@pytest.mark.parametrize(
    ("wrong", "variable"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS"),
        ({"SLURM_STEP_NUM_NODES": "3"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID"),
        ({"SLURM_PROCID": "3"}, "SLURM_PROCID"),
        ({"SLURM_LOCALID": "1"}, "SLURM_LOCALID"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,x"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST"),
        ({"SLURM_RESTART_COUNT": "once"}, "SLURM_RESTART_COUNT"),
    ],
)
def test_contradictions(wrong: dict[str, str], variable: str) -> None:
    with pytest.raises(ConfigError) as caught:
        environment.read(PER_RANK | wrong)
    assert variable in caught.value.variables


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[01-03,7]", "n01"),
        ("n[09-11]-x,z[1]", "n09-x"),
        ("gpu-a[1-2]b[3-4],c", "gpu-a1b3"),
        ("127.0.0.[2-3]", "127.0.0.2"),
    ],
)
def test_the_first_host_of_a_node_list(text: str, host: str) -> None:
    assert first_host(text) == host


@pytest.mark.parametrize("text", ["", "[a-b]", ",a"])
def test_node_lists_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="is no list of nodes"):
        first_host(text)
