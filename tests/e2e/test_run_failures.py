"""When a rank fails: the first original error comes first and once, and nothing is left running."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
from pathlib import Path

import pytest
from launching import alive, finish, node_words, run, run_each, start

CRASH = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
log = open(f"log{dist.get_rank()}.txt", "w")
log.write("last words")
print("printed by", dist.get_rank(), flush=True)
def work(rank):
    if rank == 1:
        while not os.path.exists("waiting"):
            time.sleep(0.01)
        raise ValueError("bad sample 17")
    pending = dist.all_reduce(torch.ones(4), async_op=True)
    if rank == 0:
        open("waiting", "w").close()
    pending.wait()
work(dist.get_rank())
"""


def test_the_original_error_comes_first_and_the_rest_is_in_a_folder(tmp_path: Path) -> None:
    secrets = {"NCCL_TOKEN": "sesame", "SLURM_API_KEY": "sesame", "AWS_REGION": "sesame"}
    words = "--nproc-per-node=3 --log-dir=logs"
    done = run(words, CRASH, tmp_path, NCCL_DEBUG="WARN", **secrets)
    assert done.code == 1
    lines = done.err.splitlines()[1:]
    assert lines[0] == "[1] Traceback (most recent call last):"
    assert re.fullmatch(r'\[1\]   File "[^"]*train\.py", line 18, in <module>', lines[1])
    assert lines.count("[1] ValueError: bad sample 17") == 1
    assert done.err.count("Traceback") == 1
    assert "paceline: rank 1 of 3 failed: ValueError: bad sample 17" in lines
    assert "site-packages" not in done.err
    assert "paceline/launch" not in done.err
    assert (tmp_path / "log1.txt").read_text() == "last words"

    folder = tmp_path / lines[-1].rpartition(" of the ranks here are in ")[2]
    assert list((tmp_path / "logs").iterdir()) == [folder]
    assert "rank 1 of 3 failed: ValueError" in (folder / "verdict.txt").read_text()
    assert "printed by 0" in (folder / "rank0-output.txt").read_text()
    assert "bad sample 17" in (folder / "rank1-error.txt").read_text()
    state = json.loads((folder / "rank0-state.json").read_text())["stacks and collectives"]
    # Rank 0 waited in work(). Its own error may have ended it before it was asked for its stack.
    if error := "".join(path.read_text() for path in folder.glob("rank0-error.txt")):
        assert "in work" in error
    else:
        assert "work" in [frame[2] for thread in state["threads"] for frame in thread["stack"]]
        assert state["entries"][-1]["profiling_name"] == "gloo:all_reduce"
    assert json.loads((folder / "environment.json").read_text())["NCCL_DEBUG"] == "WARN"
    assert "sesame" not in "".join(path.read_text() for path in folder.iterdir())
    assert json.loads((folder / "versions.json").read_text())["torch"]


# As Hydra does: the script catches and prints the error, and exits with a code.
CAUGHT = """
import os, sys, traceback
import torch, torch.distributed as dist
dist.init_process_group("gloo")
try:
    float("an error that was handled long before")
except ValueError:
    pass
def work(rank):
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    if rank == 1:
        raise ValueError("bad sample 17")
    dist.all_reduce(torch.ones(1000))
try:
    work(dist.get_rank())
except Exception:
    traceback.print_exc()
    sys.exit(3)
"""


@pytest.mark.ci
def test_an_error_that_the_script_caught_before_sys_exit_is_named(tmp_path: Path) -> None:
    done = run("--nproc-per-node=3", CAUGHT, tmp_path)
    assert done.code == 3
    script = tmp_path / "train.py"
    said = "paceline: rank 1 of 3 failed: ValueError: bad sample 17"
    assert said in done.err
    where, why = done.err.partition(said)[2].splitlines()[1:3]
    assert where.startswith("  where: rank 1, host ")
    assert where.endswith(f", exit code 3, {script}:13 in work")
    assert why == (
        f"  why:   the script caught the error and called sys.exit() at {script}:19 in <module>."
    )
    # A rank that lost its peer and is slow to notice is stopped, and then the report does not name it.
    assert not re.search(r"ranks? [02].* failed(?! as a consequence)", done.err.partition(said)[2])


# What rank 1 does while rank 0 waits for it; the exit code, and parts of the report.
ENDS: list[tuple[str, int, tuple[str, ...]]] = [
    ("os._exit(7)", 7, ("exit code 7", "there was no exception")),
    (
        "sys.exit(3)",
        3,
        ("exit code 3", "{script}:5 in <module>", "the script called sys.exit().\n"),
    ),
    ("os.kill(os.getpid(), 9)", 137, ("killed by SIGKILL",)),
    ("ctypes.string_at(0)", 139, ("killed by SIGSEGV", ", {script}:5 in <module>\n")),
    (
        "os.write(2, b'port 29500: Address already in use\\n'); os.abort()",
        134,
        ("killed by SIGABRT", ", {script}:5 in <module>\n"),
    ),
    (  # in a thread without Python, as Gloo does
        "thread = ctypes.c_ulong()\n"
        "start = ctypes.CDLL(None).pthread_create\n"
        "start(ctypes.byref(thread), None, ctypes.CDLL(None).abort, None)\n"
        "time.sleep(60)",
        134,
        ("killed by SIGABRT", ", {script}:"),
    ),
    (
        "raise KeyboardInterrupt",
        130,
        (
            "KeyboardInterrupt\n",
            "{script}:5 in <module>\n  why:   the script raised it, or something sent SIGINT",
        ),
    ),
    # An error that was handled before the exit is not named.
    ("try: 1 / 0\nexcept ZeroDivisionError: pass\nsys.exit(5)", 5, ("exit code 5",)),
    ("try: 1 / 0\nexcept ZeroDivisionError: raise SystemExit(5) from None", 5, ("exit code 5",)),
    # The script's own hook ends the process before the usual report.
    (
        "sys.excepthook = lambda *a: os._exit(9)\nraise OSError('x')",
        9,
        ("OSError: x\n", "{script}:6 in <module>"),
    ),
]
ALONE = """
import ctypes, os, sys, time
if os.environ["RANK"] == "0":
    time.sleep(600)
"""


def test_how_a_rank_ended_is_the_exit_code_and_the_report(tmp_path: Path) -> None:
    words = "--nproc-per-node=2"
    done = run_each([(words, ALONE + end) for end, _, _ in ENDS], tmp_path)
    for number, ((end, code, said), one) in enumerate(zip(ENDS, done, strict=True)):
        assert one.code == code, (end, one)
        assert f"paceline: rank 1 of 2 failed: {said[0]}" in one.err, (end, one)
        for text in said[1:]:
            assert text.format(script=tmp_path / f"case{number}.py") in one.err, (end, one)
        assert "Traceback" not in one.err, (end, one)
        assert "ZeroDivisionError" not in one.err
        assert "listens" not in one.err  # an abort is not explained by an earlier message


MAY_END_EARLY = """
# Rank 1 goes on until the process of rank 0 has ended.
import os
if os.environ["RANK"] == "0":
    with open("pid", "w") as file:
        file.write(str(os.getpid()))
    os.rename("pid", "whole")
    raise SystemExit
while not os.path.exists("whole"):
    pass
while os.path.exists(f"/proc/{open('whole').read()}"):
    pass
print("went on")
"""
FORKS = """
import os
if os.fork() == 0:
    raise OSError("in the child")
assert os.waitstatus_to_exitcode(os.wait()[1]) == 1
print("went on")
"""
BLOCKS = """
import os, signal, time
if os.environ["RANK"] == "1":
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    open("blocked", "w").close()
    time.sleep(600)
while not os.path.exists("blocked"):
    time.sleep(0.01)
raise OSError("x")
"""


HANDLES = """
import sys
try:
    1 / 0
except ZeroDivisionError:
    print("went on")
    sys.exit(0)
"""


@pytest.mark.ci
def test_ranks_that_end_early_fork_handle_errors_or_block_signals(tmp_path: Path) -> None:
    early, forked, handled, blocked = run_each(
        [
            ("--nproc-per-node=2", MAY_END_EARLY),
            ("--nproc-per-node=2", FORKS),
            ("--nproc-per-node=2", HANDLES),
            ("--nproc-per-node=2 --shutdown-timeout=1", BLOCKS),
        ],
        tmp_path,
    )
    assert (early.code, early.out) == (0, "[1] went on\n"), early
    assert (forked.code, forked.out.count("went on")) == (0, 2), forked
    assert forked.err.count("OSError: in the child") == 2  # it is not the rank
    assert "failed" not in forked.err
    assert (handled.code, handled.out.count("went on")) == (0, 2), handled
    assert "ZeroDivisionError" not in handled.err
    assert "failed" not in handled.err
    assert (blocked.code, "rank 0 of 2 failed: OSError: x" in blocked.err) == (1, True), blocked
    assert "rank 1" not in blocked.err


@pytest.mark.slow
def test_tensors_of_two_sizes_are_explained(tmp_path: Path) -> None:
    script = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(7 + 3 * dist.get_rank()))
"""
    done = run("--nproc-per-node=2", script, tmp_path)
    assert re.search(
        r"called last: rank [01] all_reduce #1 \(f32\[(7|10)\]\) at \S*train.py:4 in <module>\.",
        done.err,
    ), done
    assert re.search(r"paceline: rank [01] of 2 failed: killed by SIGABRT\n", done.err), done
    assert "train.py:4 in <module>\n  why:" in done.err
    assert "why:   collectives are matched by order alone" in done.err


LEAVES = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(10):
    dist.all_reduce(torch.ones(10))
    if step == 3 and dist.get_rank() == 1:
        END
"""


@pytest.mark.parametrize("end", ["os._exit(0)", pytest.param("sys.exit()", marks=pytest.mark.slow)])
def test_a_rank_that_leaves_the_others_is_named(tmp_path: Path, end: str) -> None:
    done = run("--nproc-per-node=3", LEAVES.replace("END", end), tmp_path)
    assert done.code == 1
    said = "paceline: rank 1 ended with exit code 0 while the others went on"
    assert said in done.err.splitlines()
    assert "another host" not in done.err
    # The error of one follower is printed, because it may say more.
    assert done.err.count("Traceback") == 1


JOINED = """
import sys
import paceline
sys.excepthook = lambda *a: print("my hook", a[1], flush=True)
job = paceline.join(device="cpu", timeout_s=30)
if job.rank == 1:
    raise OSError("disk is gone")
paceline.agree(job, "a thing", 1)
"""


@pytest.mark.ci
def test_the_hook_of_the_script_and_the_launcher_both_get_the_error(tmp_path: Path) -> None:
    done = run("--nproc-per-node=2", JOINED, tmp_path)
    assert done.code == 1
    assert "[1] my hook disk is gone" in done.out
    assert "paceline: rank 1 of 2 failed: OSError: disk is gone" in done.err


# Short sleeps: Python handles a signal that comes just before a sleep begins only after that sleep.
WAITS = """
import os, signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
if "TRAP":
    signal.signal(signal.Signals["TRAP"], lambda *a: (print("saved", flush=True), sys.exit(0)))
print("pids", os.getpid(), child.pid, flush=True)
while True:
    time.sleep(0.1)
"""


def _started(process: subprocess.Popen[str], ranks: int) -> list[int]:
    assert process.stdout is not None
    pids: list[int] = []
    for line in process.stdout:
        pids += [int(word) for word in line.split() if word.isdigit()]
        if len(pids) == 2 * ranks:
            return pids
    raise AssertionError(f"ended early: {process.communicate()}")


def _wait_gone(pids: list[int]) -> list[int]:
    """Wait up to 10 s for the end of each process; returns those that still run."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        select.select([fd], [], [], 10)
        os.close(fd)
    return [pid for pid in pids if alive(pid)]


@pytest.mark.parametrize(
    ("number", "trap"),
    [("SIGTERM", "SIGTERM"), ("SIGKILL", ""), pytest.param("SIGINT", "", marks=pytest.mark.slow)],
)
def test_a_signal_to_the_launcher_ends_all(tmp_path: Path, number: str, trap: str) -> None:
    (tmp_path / "train.py").write_text(WAITS.replace("TRAP", trap))
    process = start(["run", "--nproc-per-node=2", "train.py"], tmp_path)
    pids = _started(process, 2)
    sent = signal.Signals[number]
    process.send_signal(sent)
    done = finish(process)
    assert done.code == (-9 if sent is signal.SIGKILL else 128 + sent)
    assert _wait_gone(pids) == []
    if trap:
        assert done.out.count("saved") == 2
    if sent is signal.SIGINT:
        assert "train.py:8 in <module>" in done.err
        assert "Traceback" not in done.err


PACKAGE = """
import torch, torch.distributed as dist
def train():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("bad")
    dist.barrier()
"""


@pytest.mark.ci
def test_the_line_of_an_installed_package_is_shown(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "trainer"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("from trainer.loop import train\ntrain()\n")
    (package / "loop.py").write_text(PACKAGE)
    paths = [str(package.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    done = finish(
        start(
            ["run", "--nproc-per-node=2", "-m", "trainer"],
            tmp_path,
            PYTHONPATH=os.pathsep.join(paths).rstrip(os.pathsep),
        )
    )
    assert done.code == 1
    assert "site-packages/trainer/loop.py:6 in train\n" in done.err, done.err


RESTARTS = """
import os, signal
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, restarts = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with open("stores", "a") as file:
    file.write(rank + " " + os.environ["MASTER_PORT"] + "\\n")
for step in range(10):
    total = torch.ones(1000)
    dist.all_reduce(total)
    strikes = os.environ["STRIKES"].split()[restarts:]
    if step == 5 and rank == "1" and strikes:
        os.kill(os.getpid(), signal.Signals[strikes[0]])
print("done", total[0].item())
"""
RECOVERED = ["[0] done 2.0", "[1] done 2.0"]


def test_restart_after_a_kill_and_a_stop(tmp_path: Path, free_port: int) -> None:
    words = f"--nproc-per-node=2 --max-restarts=3 --master-port={free_port}"
    done = run(words, RESTARTS, tmp_path, STRIKES="SIGKILL SIGSTOP")
    assert done.code == 0, done
    assert sorted(done.out.splitlines()) == RECOVERED
    for number, how in (
        (1, "killed by SIGKILL"),
        (2, "stopped by SIGSTOP, and killed after 1 s"),
    ):
        line = rf"paceline: rank 1 failed: {how} .*; restart {number} of 3 begins\n"
        assert len(re.findall(line, done.err)) == 1, done.err


def test_restarts_come_to_an_end(tmp_path: Path) -> None:
    more = {"TMPDIR": str(tmp_path)}
    done = run("--max-restarts=1", "raise OSError('again')", tmp_path, **more)
    assert done.code == 1
    assert done.err.count("Traceback") == 1
    assert "restart 1 of 1 begins" in done.err
    assert "This was after 1 of 1 restarts." in done.err
    # Without --log-dir, the reports are in the temporary folder. Before a restart no traceback is printed.
    folders = [
        Path(line.partition(" are in ")[2]) for line in done.err.splitlines() if " are in " in line
    ]
    assert len(folders) == 2
    for folder in folders:
        assert folder.parent == tmp_path / f"paceline-{os.getuid()}" / "reports"
        assert "OSError: again" in (folder / "rank0-error.txt").read_text()


@pytest.mark.ci
def test_two_nodes_restart_together(tmp_path: Path, free_port: int) -> None:
    (tmp_path / "train.py").write_text(RESTARTS)
    words = node_words(free_port, "--max-restarts=3", "train.py")
    nodes = [start(words, tmp_path, STRIKES="SIGKILL") for _ in range(2)]
    ends = [finish(node) for node in nodes]
    assert [end.code for end in ends] == [0, 0], ends
    assert sorted(line for end in ends for line in end.out.splitlines()) == RECOVERED
    # Each round has a new store: the old one has the addresses of the ended ranks.
    stores = {tuple(line.split()) for line in (tmp_path / "stores").read_text().splitlines()}
    assert len({port for _, port in stores}) == 2
    assert len(stores) == 4


LONG_CLEAN_UP = """
import time
import paceline
try:
    with paceline.join() as job:
        job.on_leave(lambda: time.sleep(20 * (job.rank == 0)))
        if job.rank == 0:
            raise ValueError("bad sample 17")
        paceline.gather(job, 1)
except ValueError:
    if CAUGHT:
        raise SystemExit(0)
    raise
"""


@pytest.mark.ci
def test_an_error_is_the_cause_also_if_the_rank_ends_during_its_clean_up(tmp_path: Path) -> None:
    done = run("--nproc-per-node=2", LONG_CLEAN_UP.replace("CAUGHT", "False"), tmp_path)
    assert done.code == 1
    assert "[0] ValueError: bad sample 17" in done.err
    assert "paceline: rank 0 of 2 failed: ValueError: bad sample 17" in done.err


@pytest.mark.ci
def test_an_error_that_left_the_job_and_was_caught_is_no_failure(tmp_path: Path) -> None:
    script = LONG_CLEAN_UP.replace("CAUGHT", "True").replace("20", "0")
    done = run("--nproc-per-node=1", script, tmp_path)
    assert done.code == 0, done
