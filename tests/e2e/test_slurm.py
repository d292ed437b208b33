"""Jobs on a real Slurm of two nodes: tasks per node and per rank, preemption, a lost node, and `scancel`."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launching import Finished, finish, run, spawn
from scripts import training_script
from slurm_cluster import Cluster, cluster, find

from paceline.cli import main

ROOT = Path(__file__).parents[2]
LAUNCHER = [sys.executable, "-m", "paceline", "run"]
DEADLINE_S = 90.0

TRAIN = training_script(
    """
with open(f"steps{job.rank}", "a") as file:
    file.write(f"{step.number} {os.environ.get('SLURM_RESTART_COUNT', 0)} {os.getpid()}\\n")
time.sleep(float([*sys.argv, "0"][1]))
""",
    checkpoints='"runs/a", keep=2, every_steps=4',
)
LAST_STEP = 40
FACTS = """
import os, paceline
with paceline.join(device="cpu", timeout_s=30) as job:
    ranks = list(paceline.gather(job, job.rank))
    os.write(1, f"{job.launcher} {job.rank} {job.world_size} {ranks}\\n".encode())  # one write for a line
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm"), 2) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights that two ranks end with, without Slurm."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return weights(run("--nproc-per-node=2", TRAIN, folder).out)


def weights(text: str) -> str:
    (found,) = re.findall(r"weights (\w+)", text)
    return str(found)


def srun(slurm: Cluster, folder: Path, *words: str) -> Finished:
    return finish(spawn(["srun", *words], folder, own_group=True, **slurm.variables), DEADLINE_S)


def said(done: Finished) -> list[str]:
    assert done.code == 0, done
    return sorted(re.sub(r"^\[\d\] ", "", line) for line in done.out.splitlines())


def steps(folder: Path, rank: int = 0) -> list[list[int]]:
    """(step, restarts, process) of each step of a rank."""
    path = folder / f"steps{rank}"
    return (
        [[*map(int, line.split())] for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )


def wait_steps(slurm: Cluster, folder: Path, number: str, count: int) -> None:
    def reached() -> bool:
        state = slurm.job(number)["JobState"]
        assert state in ("PENDING", "CONFIGURING", "RUNNING"), (state, output(folder))
        return len(steps(folder)) >= count

    slurm.wait(reached, DEADLINE_S)


def output(folder: Path) -> str:
    return "".join(file.read_text() for file in sorted(folder.glob("*.out")))


def submit(slurm: Cluster, folder: Path, step_s: float, *more: str) -> str:
    """Submit the batch script that `paceline job slurm` writes for a training; the number of the job."""
    slurm.wait_idle()
    (folder / "train.py").write_text(TRAIN)
    before = Path.cwd()
    os.chdir(folder)
    try:
        line = "job slurm train.py --nodes 2 --cpus 2 --time 10m --grace 10s"
        assert main.main([*line.split(), *more, "--", str(step_s)]) == 0
    finally:
        os.chdir(before)
    return slurm.submit(folder / "train.slurm")


@pytest.mark.ci
def test_a_task_for_each_node_and_a_task_for_each_rank(tmp_path: Path, slurm: Cluster) -> None:
    (tmp_path / "facts.py").write_text(FACTS)
    done = srun(
        slurm, tmp_path, "-N2", "--ntasks-per-node=1", *LAUNCHER, "--nproc-per-node=2", "facts.py"
    )
    assert said(done) == [f"torchrun {rank} 4 [0, 1, 2, 3]" for rank in range(4)]
    assert f"Slurm step of 2 nodes: --nnodes=2 --host={slurm.nodes[0]}:295" in done.err
    done = srun(slurm, tmp_path, "-N2", "-n3", sys.executable, "facts.py")
    assert said(done) == [f"slurm {rank} 3 [0, 1, 2]" for rank in range(3)]


@pytest.mark.ci
def test_slurm_accepts_the_written_script_and_refuses_more_gpus_than_a_node_has(
    slurm: Cluster,
) -> None:
    script = ROOT / "tests" / "data" / "jobs" / "train.slurm"
    text = slurm.check(script)
    assert re.search(r"Job \d+ to start at ", text), text
    text = slurm.check(script, "--gpus-per-node=9")
    assert "Requested node configuration is not available" in text


FACTS_PY = f"{sys.executable} facts.py"
STEPS = {
    "ranks over PMI 2": (f"srun -N2 -n2 --mpi=pmi2 {FACTS_PY}", "slurm", 2),
    "a shell in an allocation": (f"salloc -n2 sh -c '{FACTS_PY}'", "none", 1),
    # The other tasks of an interactive shell end at once, because they have no terminal.
    "a shell of a step": (
        f"script -qec \"srun -n2 --pty sh -c '[ $SLURM_PROCID != 0 ] || {FACTS_PY}; true'\" /dev/null",
        "none",
        1,
    ),
    "a terminal for a rank": (f'script -qec "srun -n2 --pty {FACTS_PY}" /dev/null', "slurm", 2),
    "torchrun in a step": (
        f"srun -n1 {sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2 facts.py",
        "torchrun",
        2,
    ),
    "paceline run in a step": (
        f"srun -n1 {shlex.join(LAUNCHER)} --nproc-per-node=2 facts.py",
        "torchrun",
        2,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_what_a_process_of_slurm_is(tmp_path: Path, slurm: Cluster, name: str) -> None:
    command, launcher, count = STEPS[name]
    find(command.split()[0])
    (tmp_path / "facts.py").write_text(FACTS)
    done = finish(spawn(shlex.split(command), tmp_path, own_group=True, **slurm.variables))
    assert done.code == 0, done
    # Only the first task has the terminal.
    ranks = range(1 if "--pty" in command else count)
    for rank in ranks:
        assert f"{launcher} {rank} {count} {[*range(count)]}" in done.out, done


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "exit", "unleft"])
def test_the_other_ranks_of_a_step_name_the_rank_that_ended_first(
    tmp_path: Path, slurm: Cluster, how: str
) -> None:
    """srun does not end the other ranks, so all of them report."""
    end, said = {
        "raise": ("raise ValueError('bad sample 17')", "ValueError: bad sample 17"),
        "exit": ("sys.exit(0)", "StepError: rank 1 left the training loop after step 5"),
        "unleft": ("sys.exit(0)", "StepError: the process ended without leaving the job"),
    }[how]
    text = training_script(f"if job.rank == 1 and step.number == 5: {end}")
    if how == "unleft":
        joins = next(line for line in text.splitlines() if line.startswith("with "))
        text = text.replace(joins, f"job = {joins[5:-8]}\nif True:")
    (tmp_path / "train.py").write_text(text)
    done = srun(slurm, tmp_path, "-n3", sys.executable, "train.py")
    assert done.code != 0
    lines = done.err.splitlines()
    followers = [line for line in lines if "PeerFailed: rank 1 failed first" in line]
    assert [line[:7] for line in sorted(followers)] == ["[rank0]", "[rank2]"], done.err
    assert all(said in line for line in followers)


@pytest.mark.slow
def test_a_launcher_in_each_of_several_tasks_of_a_node_is_refused(
    tmp_path: Path, slurm: Cluster
) -> None:
    (tmp_path / "facts.py").write_text(FACTS)
    done = srun(slurm, tmp_path, "-N2", "-n4", *LAUNCHER, "facts.py")
    assert done.code != 0
    assert "srun has started 4 launchers on 2 nodes" in done.err
    assert "#SBATCH --ntasks-per-node=1" in done.err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_preemption_requeue_and_the_same_weights(
    tmp_path: Path, slurm: Cluster, undisturbed: str
) -> None:
    """A job of higher priority takes the nodes."""
    number = submit(slurm, tmp_path, 0.2)
    wait_steps(slurm, tmp_path, number, 5)
    (tmp_path / "urgent.sh").write_text("#!/bin/bash\n: > urgent\n")
    urgent = slurm.submit(tmp_path / "urgent.sh", "-N2", "--exclusive", "--partition=urgent")
    slurm.wait_state(urgent, "COMPLETED")
    assert (tmp_path / "urgent").exists()
    job = slurm.wait_state(number, "COMPLETED", "FAILED", "CANCELLED", timeout_s=DEADLINE_S)
    text = output(tmp_path)
    assert job["JobState"] == "COMPLETED", text
    assert job["Restarts"] == "1"
    assert "exit code 75 requests a restart" in text
    assert weights(text) == undisturbed
    # No step was lost and none was done twice: the checkpoint is that of the last step.
    for rank in (0, 1):
        done = steps(tmp_path, rank)
        assert [step for step, _, _ in done] == list(range(1, LAST_STEP + 1))
        assert {restarts for _, restarts, _ in done} == {0, 1}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_signal_before_the_end_of_the_time(
    tmp_path: Path, slurm: Cluster, undisturbed: str
) -> None:
    """`scancel --signal` sends what `--signal` of the batch script sends."""
    number = submit(slurm, tmp_path, 0.1)
    wait_steps(slurm, tmp_path, number, 5)
    slurm.command("scancel", "--signal=TERM", number)
    job = slurm.wait_state(number, "COMPLETED", "FAILED", "CANCELLED", timeout_s=DEADLINE_S)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), output(tmp_path)
    assert weights(output(tmp_path)) == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_lost_node(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, undisturbed: str
) -> None:
    """Slurm queues the job again, and it goes on from its last checkpoint when the node is back."""
    with cluster(tmp_path_factory.mktemp("own"), 2) as own:
        number = submit(own, tmp_path, 0.3)
        wait_steps(own, tmp_path, number, 6)
        own.kill_node(own.nodes[1])
        own.wait(lambda: own.job(number)["Restarts"] == "1", DEADLINE_S)
        own.serve_node(own.nodes[1])
        job = own.wait_state(number, "COMPLETED", "FAILED", "CANCELLED", timeout_s=DEADLINE_S)
        assert job["JobState"] == "COMPLETED", output(tmp_path)
    assert weights(output(tmp_path)) == undisturbed


@pytest.mark.slow
def test_scancel_ends_all_processes(tmp_path: Path, slurm: Cluster) -> None:
    number = submit(slurm, tmp_path, 0.1)
    wait_steps(slurm, tmp_path, number, 5)
    ranks = [steps(tmp_path, rank)[-1][2] for rank in (0, 1)]
    slurm.command("scancel", number)
    slurm.wait_state(number, "CANCELLED")
    slurm.wait_idle()
    assert not any(psutil.pid_exists(pid) for pid in ranks)
    assert slurm.job(number)["Restarts"] == "0"
    last = steps(tmp_path)[-1][0]
    assert 5 <= last < LAST_STEP


@pytest.mark.slow
def test_two_tasks_of_an_array_do_not_meet(tmp_path: Path, slurm: Cluster) -> None:
    """On one node, at the same time."""
    (tmp_path / "facts.py").write_text(FACTS)
    line = f"srun {sys.executable} facts.py"
    (tmp_path / "array.sh").write_text(f"#!/bin/bash\n{line}\n")
    slurm.wait_idle()
    options = (
        "--array=3-4",
        "-N1",
        "-n2",
        f"--nodelist={slurm.nodes[0]}",
        "-o",
        "%a.out",
        "--wait",
    )
    slurm.submit(tmp_path / "array.sh", *options)
    for task in (3, 4):
        text = (tmp_path / f"{task}.out").read_text()
        assert sorted(text.splitlines()) == ["slurm 0 2 [0, 1]", "slurm 1 2 [0, 1]"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_end_of_the_time(tmp_path: Path, slurm: Cluster, undisturbed: str) -> None:
    """Slurm signals the launchers 25 s before the two minutes are over, or up to a minute earlier."""
    number = submit(slurm, tmp_path, 3.0, "--time=2m")
    slurm.wait(lambda: slurm.job(number)["Restarts"] == "1", 150)
    slurm.command("scontrol", "update", f"JobId={number}", "TimeLimit=10")
    job = slurm.wait_state(number, "COMPLETED", "FAILED", "TIMEOUT", timeout_s=120)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), output(tmp_path)
    assert weights(output(tmp_path)) == undisturbed
