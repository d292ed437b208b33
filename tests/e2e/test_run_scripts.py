"""`paceline run` runs scripts that were written for torchrun, as their own interpreter would."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from launching import finish, run, run_each, spawn, start

PLAIN = """
import os, sys
import torch, torch.distributed as dist
assert "paceline" not in sys.modules  # only a script that imports it gets it
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK MASTER_ADDR OMP_NUM_THREADS"
print(total.item(), *(os.environ[name] for name in names.split()), sys.argv, __name__, __spec__)
listening = [line.split() for line in open("/proc/net/tcp")][1:]
port = int(os.environ["MASTER_PORT"])
print("store", [f[1] for f in listening if f[3] == "0A" and int(f[1].split(":")[1], 16) == port])
"""


def test_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    done = finish(start(["run", "--nproc-per-node=2", "train.py", "--lr", "1"], tmp_path))
    assert done.code == 0, done
    lines = sorted(done.out.splitlines())
    for rank in (0, 1):
        shown = f"[{rank}] 2.0 {rank} {rank} 2 2 0 {rank} 127.0.0.1 "
        assert any(line.startswith(shown) for line in lines), lines
    assert lines[0].endswith("['train.py', '--lr', '1'] __main__ None")
    # 0100007F is 127.0.0.1: the store listens there and nowhere else.
    assert [line for line in lines if "store" in line and "0100007F" in line]
    assert done.err.count("\n") == 1
    assert done.err.startswith("paceline: 2 ranks on localhost, ")


EXECUTES_ITSELF = """
import os, sys
times = int(os.environ.get("TIMES", 0))
if times < 2:
    os.environ["TIMES"] = str(times + 1)
    os.execv(sys.executable, [sys.orig_argv, [sys.executable, *sys.argv]][times])
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(total.item(), sys.argv[1:])
dist.destroy_process_group()
"""


@pytest.mark.parametrize("target", ["train.py", pytest.param("-m train", marks=pytest.mark.slow)])
@pytest.mark.ci
def test_a_script_may_execute_itself_again(tmp_path: Path, target: str) -> None:
    (tmp_path / "train.py").write_text(EXECUTES_ITSELF)
    words = ["run", "--nproc-per-node=2", *target.split(), "--lr", "1"]
    done = finish(start(words, tmp_path))
    assert done.code == 0, done.err
    assert done.out.count("2.0 ['--lr', '1']") == 2


SPAWNS = """
import torch.multiprocessing as mp
import paceline

def work(index):
    print("child", index, paceline.value, flush=True)

if __name__ == "__main__":
    mp.spawn(work, nprocs=1)
"""


@pytest.mark.ci
def test_a_file_named_paceline_hides_only_the_package_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job/train.py").write_text(SPAWNS)
    (tmp_path / "job/paceline.py").write_text("value = 7")
    done = finish(start(["run", "job/train.py"], tmp_path))
    assert (done.code, done.out) == (0, "child 0 7\n"), done.err


AS_ITSELF = """
import atexit, multiprocessing, os, pickle, sys, threading
os.environ["OMP_NUM_THREADS"], os.environ["PYTORCH_JIT"] = "1", "0"
import torch, torch.distributed as dist
from torch.utils.data import DataLoader

class Item:
    def __len__(self): return 4
    def __getitem__(self, i): return i

class Last:
    def __del__(self): print("finalised with", os.sep)

def double(x): return 2 * x

if __name__ == "__main__":
    import paceline.exit_codes
    print(torch.get_num_threads(), torch.jit._state._enabled.enabled, int(paceline.exit_codes.ExitCode.OK))
    dist.init_process_group("gloo")
    last = Last()
    atexit.register(lambda: print("atexit", double(1)))
    gate = threading.Event()
    threading.Thread(target=lambda: (gate.wait(30), print("joined"))).start()
    assert pickle.loads(pickle.dumps(double)) is double
    for context in ("spawn", "fork"):
        loader = DataLoader(Item(), num_workers=1, multiprocessing_context=context)
        print(context, sum(int(x) for x in loader))
    log = open("log.txt", "w")
    log.write("not flushed by the script")
    print("end of script")
    threading.Timer(0.1, gate.set).start()
"""


def test_a_script_runs_as_in_its_own_interpreter(tmp_path: Path) -> None:
    done = run("", AS_ITSELF, tmp_path)
    assert done.code == 0, done
    expected = ["1 False 0", "spawn 6", "fork 6", "end of script", "joined", "atexit 2"]
    assert done.out.splitlines() == [*expected, "finalised with /"]
    assert (tmp_path / "log.txt").read_text() == "not flushed by the script"


@pytest.mark.slow
def test_a_module_with_an_exit_code_and_its_own_threads(tmp_path: Path) -> None:
    package = tmp_path / "box"
    package.mkdir()
    (package / "__init__.py").touch()
    show = "print(__spec__.name, sys.argv[1:], os.environ['OMP_NUM_THREADS'])"
    (package / "tool.py").write_text(f"import os, sys; {show}; sys.exit(5)")
    done = finish(start(["run", "-m", "box.tool", "a"], tmp_path, OMP_NUM_THREADS="4"))
    assert (done.code, done.out) == (5, "box.tool ['a'] 4\n")
    assert "4 threads each (OMP_NUM_THREADS is set)" in done.err
    assert "rank 0 of 1 failed: exit code 5" in done.err


def test_programs_without_python(tmp_path: Path) -> None:
    # Rank 1 fails and ends rank 0, so it waits until rank 0 has printed its line.
    show = (
        'echo "$RANK of $WORLD_SIZE: $1" $(grep SigIgn /proc/self/status); '
        "touch done$RANK; until [ -e done0 ]; do sleep 0.1; done"
    )
    (tmp_path / "show.sh").write_text(f"{show}; exit $RANK")
    words = ["run", "--nproc-per-node=2", "--no-python", "sh", "show.sh", "x"]
    done = finish(start(words, tmp_path))
    lines = [line.partition(" SigIgn: ") for line in sorted(done.out.splitlines())]
    assert [line for line, _, _ in lines] == ["[0] 0 of 2: x", "[1] 1 of 2: x"]
    # Python ignores these, and a program would inherit it. This process may have inherited others.
    ignored_by_python = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1
    assert not any(int(mask, 16) & ignored_by_python for _, _, mask in lines)
    assert done.code == 1
    assert "--no-python" in done.err


CLEAN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
for _ in range(3):
    model(torch.randn(4, 8)).sum().backward()
"""


# With torch 2.13, a group that DDP has used keeps its threads after destroy_process_group().
DESTROYED = f"""{CLEAN}
import sys
class Kept:
    def __del__(self): print("the interpreter shut down while threads of Gloo were alive")
sys.kept = Kept()
dist.destroy_process_group()
"""


@pytest.mark.ci
def test_the_interpreter_does_not_shut_down_while_threads_of_gloo_live(tmp_path: Path) -> None:
    done = run("--nproc-per-node=2", DESTROYED, tmp_path)
    assert (done.code, done.out) == (0, ""), done


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_clean_script_ends_cleanly_every_time(tmp_path: Path) -> None:
    for _ in range(25):
        for script in (CLEAN, DESTROYED):
            done = run("--nproc-per-node=2", script, tmp_path)
            assert (done.code, done.out) == (0, ""), done


REPLACES_MAIN = f"""{CLEAN}
import sys, types
sys.modules["__main__"] = types.ModuleType("__main__")
"""


@pytest.mark.ci
def test_a_script_may_replace_its_main_module(tmp_path: Path) -> None:
    done = run("--nproc-per-node=2", REPLACES_MAIN, tmp_path)
    assert (done.code, done.out) == (0, ""), done
    assert "Exception ignored" not in done.err


@pytest.mark.ci
def test_a_script_from_a_pipe_runs(tmp_path: Path) -> None:
    fifo = tmp_path / "train.py"
    os.mkfifo(fifo)
    launcher = start(["run", "--nproc-per-node=1", "train.py"], tmp_path)
    fifo.write_text("import __main__\nprint('hi', __main__.__file__)\n")
    done = finish(launcher)
    assert (done.code, done.out) == (0, f"hi {fifo}\n"), done


# Words, exit code, and the beginning of the message.
BAD = [
    ("no.py", 2, "paceline: there is no script 'no.py'"),
    ("--nnodes=2 --node-rank=5 {}", 2, "paceline: --node-rank is 5, and there are 2 nodes"),
]
if not torch.cuda.is_available():
    BAD += [
        ("--nproc-per-node=gpu {}", 2, "paceline: --nproc-per-node=gpu cannot be used here: "),
        ("--numa-binding=node {}", 2, "paceline run: unrecognized arguments: --numa-binding=node."),
    ]


@pytest.mark.ci
def test_bad_input_is_refused_with_a_reason(tmp_path: Path) -> None:
    cases = [(words if "{}" in words else f"{words} {{}}", "print('ran')") for words, _, _ in BAD]
    for (words, code, reason), one in zip(BAD, run_each(cases, tmp_path), strict=True):
        assert (one.code, one.out) == (code, ""), (words, one)
        assert one.err.startswith(reason), (words, one)
        assert "Traceback" not in one.err


def test_a_script_that_is_not_python_is_one_failure(tmp_path: Path) -> None:
    done = run("--nproc-per-node=2", "x = = 1", tmp_path)
    assert done.code == 1, done
    assert "paceline: ranks 0 and 1 of 2 failed: SyntaxError: invalid syntax" in done.err


@pytest.mark.ci
@pytest.mark.parametrize(
    ("limit", "more", "fix"),
    [
        ("unlimited", {"PYTHON_EXEC": "/nonexistent"}, "the interpreter in PYTHON_EXEC"),
        ("60", {}, "raise the limit of open files"),
    ],
)
def test_ranks_that_cannot_be_started_are_an_error_with_a_fix(
    tmp_path: Path, limit: str, more: dict[str, str], fix: str
) -> None:
    (tmp_path / "train.py").touch()
    limits = f"ulimit -n {limit}; " if limit != "unlimited" else ""
    command = f"{limits}exec {sys.executable} -m paceline run --nproc-per-node 20 train.py"
    done = finish(spawn(["sh", "-c", command], tmp_path, **more))
    assert done.code == 1
    assert "of 20 cannot be started on this host" in done.err
    assert fix in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    "more", [pytest.param([], marks=pytest.mark.slow), ["--rdzv-backend=c10d"]]
)
@pytest.mark.ci
def test_the_launcher_says_that_it_waits_for_nodes(
    tmp_path: Path, more: list[str], free_port: int
) -> None:
    (tmp_path / "good.py").write_text("print('ran')")
    address = "--rdzv-endpoint=127.0.0.1" if more else "--master-port"
    words = ["run", "--nnodes=2", *more, f"{address}{':' if more else '='}{free_port}", "good.py"]
    process = start(words, tmp_path)
    assert process.stderr is not None
    said = process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert said.startswith(f"paceline: waiting for 2 nodes at 127.0.0.1:{free_port}")
    assert "--host" in said  # no other host can reach this address
    assert (done.code, done.out) == (128 + signal.SIGTERM, "")
