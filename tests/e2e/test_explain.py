"""Messages that users meet, provoked anew, are known as what they are, also by the verdict."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment, finish, run, spawn
from provocations import ONE_PROCESS

from paceline.explain.reading import recognise

DEADLINE_S = 60
TORCHRUN = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
GROUP = """
import datetime, os, sys, time, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
wait = datetime.timedelta(seconds=8)
def join():
    dist.init_process_group("gloo", timeout=wait)
"""


def _python(words: list[str], **more: str) -> str:
    """What a Python process writes to both streams."""
    done = subprocess.run(
        [sys.executable, *words],
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=DEADLINE_S,
    )
    return done.stdout


def _torchrun(script: str, tmp_path: Path, nproc: int = 2, **more: str) -> str:
    (tmp_path / "train.py").write_text(GROUP + script)
    return _python([*TORCHRUN, f"--nproc-per-node={nproc}", str(tmp_path / "train.py")], **more)


def _first(text: str) -> str:
    hit = recognise(text)
    assert hit is not None, text
    return hit.cause.name


@pytest.fixture(scope="module")
def one_process() -> list[str]:
    """What each provocation of one process printed."""
    text = _python([str(Path(__file__).with_name("provocations.py"))])
    return re.split(r"^=== \d+\n", text, flags=re.MULTILINE)[1:]


@pytest.mark.ci
@pytest.mark.parametrize("number", [n for n, (name, _) in enumerate(ONE_PROCESS) if name])
def test_one_process(one_process: list[str], number: int) -> None:
    assert _first(one_process[number]) == ONE_PROCESS[number][0]


@pytest.mark.ci
def test_a_port_that_is_taken_has_its_owner_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        script = f"import torch.distributed as d; d.TCPStore('127.0.0.1', {port}, 1, True)"
        done = run("--nproc-per-node 1", script, tmp_path)
    assert "  why:   another process listens on it" in done.err
    assert f"On this host, port {port} is now used by pid {os.getpid()} (" in done.err
    assert "  fix:   do not set --master-port" in done.err


@pytest.mark.ci
def test_a_log_of_torchrun_by_a_pipe(tmp_path: Path) -> None:
    script = "if rank == 1: raise ValueError('bad sample')\njoin()\n"
    text = _torchrun(script, tmp_path)
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "paceline", "explain", "-"],
        env=environment(),
        input=text,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0
    assert "The first Python error that is not in the table: <stdin>:" in done.stdout
    assert "ValueError: bad sample" in done.stdout
    assert "(error-file-missing)" in done.stdout
    assert "harmless: torchrun set one thread per rank (omp-threads, line 3)" in done.stdout
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE), "explain imports torch"


@pytest.mark.parametrize(
    ("name", "script", "variables"),
    [
        pytest.param(
            "collective-mismatch",
            "join(); dist.all_reduce(torch.ones(4 + 4 * rank))",
            {},
            marks=pytest.mark.ci,
        ),
        pytest.param(
            "collective-mismatch",
            "join(); dist.all_reduce(torch.ones(4 + 4 * rank))",
            {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "ddp-models-differ",
            "join(); torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2 + rank))",
            {},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "ddp-models-differ",
            "join(); torch.nn.parallel.DistributedDataParallel("
            "torch.nn.Linear(2, 2, bias=bool(rank)))",
            {},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "monitored-barrier",
            "join(); rank or dist.monitored_barrier(timeout=wait / 4); time.sleep(30)",
            {},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_ranks_of_torchrun(
    tmp_path: Path, name: str, script: str, variables: dict[str, str]
) -> None:
    assert _first(_torchrun(script, tmp_path, **variables)) == name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "name"),
    [
        (signal.SIGKILL, "killed"),
        (signal.SIGBUS, "bus-error"),
        (signal.SIGSEGV, "segmentation-fault"),
        (signal.SIGABRT, "aborted"),
        (signal.SIGILL, "illegal-instruction"),
        (signal.SIGFPE, "division-by-zero"),
    ],
)
def test_signals(tmp_path: Path, number: int, name: str) -> None:
    assert _first(_torchrun(f"os.kill(os.getpid(), {int(number)})", tmp_path, nproc=1)) == name


@pytest.mark.slow
def test_followers_alone(tmp_path: Path) -> None:
    timeout = "join()\nif rank == 0: dist.all_reduce(torch.ones(4))\ntime.sleep(30)"
    text = _torchrun(timeout, tmp_path).partition("torch.distributed.elastic")[0]
    assert _first(text.partition("ChildFailed")[0]) == "gloo-timeout"
    lost = "join()\nif rank == 0: dist.all_reduce(torch.ones(4))\nos._exit(1)"
    text = _torchrun(lost, tmp_path)
    assert _first("\n".join(line for line in text.splitlines() if "[rank0]" in line)) == "peer-lost"


@pytest.mark.slow
def test_stopped_by_the_scheduler(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time; print('ready', flush=True); time.sleep(30)")
    process = subprocess.Popen(
        [sys.executable, *TORCHRUN, "--nproc-per-node=2", str(tmp_path / "train.py")],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    while "ready" not in process.stdout.readline():
        assert process.poll() is None
    process.terminate()
    assert _first(process.communicate(timeout=DEADLINE_S)[0]) == "scheduler-stopped-it"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "script"),
    [
        (
            "main-guard",
            "import torch.multiprocessing as mp\ndef work(rank): pass\nmp.spawn(work, nprocs=1)\n",
        ),
        (
            "too-many-files",
            "import resource, torch\n"
            "from torch.utils.data import DataLoader\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
            "data = [torch.ones(9)] * 8\n"
            "kept = [b for _ in range(20) for b in DataLoader(data, num_workers=1)]\n",
        ),
    ],
)
def test_scripts(tmp_path: Path, name: str, script: str) -> None:
    (tmp_path / "train.py").write_text(script)
    assert _first(_python([str(tmp_path / "train.py")])) == name


@pytest.mark.slow
def test_two_hosts_that_offer_each_other_the_loopback(tmp_path: Path) -> None:
    if os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("ip")):
        pytest.skip("needs root, unshare and ip, for hosts of their own")
    script = f"""
import datetime, sys, torch.distributed as dist
rank, store = int(sys.argv[1]), dist.FileStore({str(tmp_path / "store")!r}, 2)
store.set(f"come{{rank}}", "")
store.wait(["come0", "come1"])
wait = datetime.timedelta(seconds=2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=wait)
"""
    isolated = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    hosts = [
        spawn([*isolated, sys.executable, "-c", script, rank], tmp_path, GLOO_SOCKET_IFNAME="lo")
        for rank in ("0", "1")
    ]
    # One waits to be connected to, and the other one connects to itself.
    assert sorted(_first(finish(host).err) for host in hosts) == ["gloo-connect", "loopback"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "isolate", "script"),
    [
        (
            "loopback-name",
            "-u sh -c 'hostname no-such-name-here && exec \"$@\"' sh",
            "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
        ),
        (
            "shared-memory",
            "-m sh -c 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec \"$@\"' sh",
            "list(torch.utils.data.DataLoader([torch.ones(1 << 20)] * 8, num_workers=1))",
        ),
    ],
)
def test_hosts_set_up_wrongly(tmp_path: Path, name: str, isolate: str, script: str) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare, for a host of its own")
    (tmp_path / "train.py").write_text(f"import torch, torch.distributed as dist\n{script}\n")
    done = subprocess.run(
        ["sh", "-c", f'unshare {isolate} "$@"', "sh", sys.executable, str(tmp_path / "train.py")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert _first(done.stdout + done.stderr) == name
