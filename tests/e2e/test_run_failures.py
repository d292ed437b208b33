"""When a rank fails: the first original error comes first and once, and nothing is left running."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launching import alive, finish, node_words, run, spawn, start

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
    (tmp_path / "logs").mkdir()
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

    folder = tmp_path / lines[-1].rpartition(" of all ranks are in ")[2]
    assert folder.parent == tmp_path / "logs"
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
    # A follower that is slow to notice is stopped, and then the report does not name it.
    assert not re.search(r"ranks? [02].* failed", done.err.partition(said)[2])


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("pass\nsys.exit(5)", 5, "exit code 5"),
        pytest.param("sys.exit(0)", 0, "", marks=pytest.mark.slow),
        pytest.param("raise SystemExit(5) from None", 5, "exit code 5", marks=pytest.mark.slow),
    ],
)
def test_an_error_that_was_handled_before_the_exit_is_not_named(
    tmp_path: Path, text: str, code: int, said: str
) -> None:
    script = f"import sys\ntry: 1 / 0\nexcept ZeroDivisionError: {text}"
    done = run("", script, tmp_path, PACELINE_PRELOAD="0")
    assert done.code == code
    assert "ZeroDivisionError" not in done.err
    assert said in done.err


PRINTED = """
import sys, traceback
failed = False
try:
    raise ValueError("bad sample 17")
except Exception:
    traceback.print_exc()
    failed = True
if failed:
    sys.exit(1)
"""


def test_an_error_that_was_printed_before_the_exit_is_pointed_at(tmp_path: Path) -> None:
    done = run("", PRINTED, tmp_path, PACELINE_PRELOAD="0")
    assert done.code == 1
    why = "  why:   the script called sys.exit(). It had printed an exception before, see above.\n"
    assert why in done.err


def test_an_abort_is_not_explained_by_an_earlier_message(tmp_path: Path) -> None:
    script = "import os\nos.write(2, b'port 29500: Address already in use; trying 29501\\n')\n"
    done = run("", script + "os.abort()", tmp_path, PACELINE_PRELOAD="0")
    assert done.code == 128 + signal.SIGABRT
    assert "killed by SIGABRT" in done.err
    assert "listens" not in done.err


ENDS = [
    ("os._exit(7)", 7, "exit code 7"),
    ("sys.exit(3)", 3, "exit code 3"),
    ("os.kill(os.getpid(), 9)", 137, "killed by SIGKILL"),
    ("ctypes.string_at(0)", 139, "killed by SIGSEGV"),
]


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [ENDS[2], *(pytest.param(*end, marks=pytest.mark.slow) for end in (ENDS[0], ENDS[1], ENDS[3]))],
)
def test_the_exit_code_is_the_ranks(tmp_path: Path, end: str, code: int, said: str) -> None:
    script = f"import ctypes, os, sys, time\nif os.environ['RANK'] == '1': {end}\ntime.sleep(60)"
    done = run("--nproc-per-node=2", script, tmp_path, PACELINE_PRELOAD="0")
    assert done.code == code
    assert f"rank 1 of 2 failed: {said}" in done.err


@pytest.mark.slow
def test_tensors_of_two_sizes_are_explained(tmp_path: Path) -> None:
    script = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(7 + 3 * dist.get_rank()))
"""
    done = run("--nproc-per-node=2", script, tmp_path)
    assert re.search(r"called last: rank [01] all_reduce #1 \(f32\[(7|10)\]\)\.", done.err), done
    assert re.search(r"paceline: rank [01] of 2 failed: killed by SIGABRT\n", done.err), done
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


def test_the_hook_of_the_script_and_the_launcher_both_get_the_error(tmp_path: Path) -> None:
    done = run("--nproc-per-node=2", JOINED, tmp_path)
    assert done.code == 1
    assert "[1] my hook disk is gone" in done.out
    assert "paceline: rank 1 of 2 failed: OSError: disk is gone" in done.err


@pytest.mark.slow
def test_a_rank_may_end_early(tmp_path: Path) -> None:
    # Rank 1 goes on until the process of rank 0 has ended.
    script = """
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
    done = run("--nproc-per-node=2", script, tmp_path, PACELINE_PRELOAD="0")
    assert (done.code, done.out) == (0, "[1] went on\n")


WAITS = """
import os, signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
if "TRAP":
    signal.signal(signal.Signals["TRAP"], lambda *a: (print("saved", flush=True), sys.exit(0)))
print("pids", os.getpid(), child.pid, flush=True)
time.sleep(600)
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
    process = start(["run", "--nproc-per-node=2", "train.py"], tmp_path, PACELINE_PRELOAD="0")
    pids = _started(process, 2)
    sent = signal.Signals[number]
    process.send_signal(sent)
    done = finish(process)
    assert done.code == (-9 if sent is signal.SIGKILL else 128 + sent)
    assert _wait_gone(pids) == []
    if trap:
        assert done.out.count("saved") == 2
    if sent is signal.SIGINT:
        assert "train.py:7 in <module>" in done.err
        assert "Traceback" not in done.err


PACKAGE = """
import torch, torch.distributed as dist
def train():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        FAULT
    dist.barrier()
"""


@pytest.mark.parametrize("fault", ["raise ValueError('bad')", "time.sleep(100)"])
def test_the_line_of_an_installed_package_is_shown(tmp_path: Path, fault: str) -> None:
    package = tmp_path / "site-packages" / "trainer"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("from trainer.loop import train\ntrain()\n")
    (package / "loop.py").write_text("import time" + PACKAGE.replace("FAULT", fault))
    words = ["run", "--nproc-per-node=2", "--hang-after=2", "--on-hang=end", "-m", "trainer"]
    paths = [str(package.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    done = finish(start(words, tmp_path, PYTHONPATH=os.pathsep.join(paths).rstrip(os.pathsep)))
    assert done.code == 1
    where = "site-packages/trainer/loop.py:6"
    said = f"{where} in train\n" if "raise" in fault else f"not entered it: train() at {where}"
    assert said in done.err, done.err


INTERRUPTED = """
import os, time
if os.environ["RANK"] == "1":
    raise KeyboardInterrupt
time.sleep(100)
"""


def test_a_keyboard_interrupt_of_one_rank_is_no_signal_to_the_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(INTERRUPTED)
    done = finish(start(["run", "--nproc-per-node=2", "train.py"], tmp_path))
    assert done.code == 130
    assert "paceline: rank 1 of 2 failed: KeyboardInterrupt\n" in done.err
    assert (
        "train.py:4 in <module>\n  why:   the script raised it, or something sent SIGINT"
        in done.err
    )
    assert "Traceback" not in done.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU to bind to")
def test_ranks_cannot_be_bound_to_the_cores_of_a_gpu_without_one(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = finish(start(["run", "--numa-binding=node", "train.py"], tmp_path))
    assert done.code == 2
    assert "paceline: --numa-binding needs NVIDIA GPUs, and torch sees none here." in done.err
    assert "Traceback" not in done.err


RESTARTS = """
import os, signal
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = os.environ["RANK"]
with open("stores", "a") as file:
    file.write(rank + " " + os.environ["MASTER_PORT"] + "\\n")
for step in range(10):
    total = torch.ones(1000)
    dist.all_reduce(total)
    if step == 5 and rank == "1" and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
print("done", total[0].item())
"""
RECOVERED = ["[0] done 2.0", "[1] done 2.0"]


def test_restart_after_a_kill(tmp_path: Path, free_port: int) -> None:
    words = f"--nproc-per-node=2 --max-restarts=3 --master-port={free_port}"
    done = run(words, RESTARTS, tmp_path)
    assert done.code == 0, done
    assert sorted(done.out.splitlines()) == RECOVERED
    assert done.err.count("rank 1 failed: killed by SIGKILL") == 1
    assert done.err.count("restart 1 of 3 begins") == 1


def test_restarts_come_to_an_end(tmp_path: Path) -> None:
    more = {"PACELINE_PRELOAD": "0", "TMPDIR": str(tmp_path)}
    done = run("--max-restarts=1", "raise OSError('again')", tmp_path, **more)
    assert done.code == 1
    assert done.err.count("Traceback") == 1
    assert "restart 1 of 1 begins" in done.err
    assert "This was after 1 of 1 restarts." in done.err
    # Without --log-dir, the report is in the temporary folder.
    folder = Path(done.err.splitlines()[-1].rpartition(" are in ")[2])
    assert folder.parent == tmp_path / f"paceline-{os.getuid()}" / "reports"
    assert "OSError: again" in (folder / "rank0-error.txt").read_text()


def test_two_nodes_restart_together(tmp_path: Path, free_port: int) -> None:
    (tmp_path / "train.py").write_text(RESTARTS)
    words = node_words(free_port, "--max-restarts=3", "train.py")
    nodes = [start(words, tmp_path) for _ in range(2)]
    ends = [finish(node) for node in nodes]
    assert [end.code for end in ends] == [0, 0], ends
    assert sorted(line for end in ends for line in end.out.splitlines()) == RECOVERED
    # Each round has a new store: the old one has the addresses of the ended ranks.
    stores = {tuple(line.split()) for line in (tmp_path / "stores").read_text().splitlines()}
    assert len({port for _, port in stores}) == 2
    assert len(stores) == 4


@pytest.mark.slow
def test_a_program_may_call_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
    program = "from paceline.launch import run; print(*(run(['train.py', n]) for n in '40'))"
    done = finish(spawn([sys.executable, "-c", program], tmp_path, PACELINE_PRELOAD="0"))
    assert done.out == "4 0\n", done
