"""Another user of the host against a running job: no file changed, no code run, no credential read."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launching import environment, finish, node_words, start, wait_until
from torch.distributed import TCPStore

pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user"),
    pytest.mark.skipif(not hasattr(TCPStore, "list_keys"), reason="torch cannot list keys"),
]

SECRETS = ["0123456789abcdef-of-the-environment", "in-the-text-12345"]
VICTIM = """
import os, sys, time
import torch, torch.distributed as dist
import paceline
victim = open("victim", "r+b")
rank = os.environ["RANK"]
with open(f"ready{rank}.new", "w") as file:
    print(os.environ["MASTER_PORT"], os.getpid(), victim.fileno(), file=file)
os.rename(f"ready{rank}.new", f"ready{rank}")
def wait(name):
    while not os.path.exists(name):
        time.sleep(0.01)
wait("attacked")
with paceline.join(device="cpu", backend="BACKEND", timeout_s=30) as job:
    for _ in range(20):
        group = dist.new_group(backend="BACKEND")
        dist.all_reduce(torch.ones(5), group=group)
    total = torch.ones(100_000)
    dist.all_reduce(total, group=job.group)
    assert total[0] == 2
    dist.barrier()
    loader = iter(torch.utils.data.DataLoader(torch.ones(9, 9), num_workers=1))
    next(loader)
    open(f"trained{rank}", "w").close()
    wait("end")
    if job.rank == 1:
        raise ValueError(f"refused: {os.environ['WANDB_API_KEY']}, password='in-the-text-12345'")
    dist.all_reduce(total, group=job.group)
"""
# Imports as root, because another user may not read the interpreter's files, and then becomes nobody.
ATTACK = """
import base64, json, os, pickle, random, re, sys, time
from datetime import timedelta
import torch
from torch.distributed import TCPStore
port, order = int(sys.argv[1]), json.loads(sys.argv[2])
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1))
print("connected", flush=True)

class Code:
    def __reduce__(self):
        return os.mkdir, (order["code"],)

code = pickle.dumps(Code())
seen, forged, leaks = set(), 0, set()
def look(text):
    seen.add(text)
    leaks.update(secret for secret in order["secrets"] if secret in text)
try:
    while True:
        time.sleep(order["pause_s"])
        for key in store.list_keys():
            value = store.get(key)
            look(key)
            look(value.decode(errors="replace"))
            if key.endswith("/memory"):
                memory = re.search(rb"[0-9a-f]{16} .*", value)
                if memory and order["places"]:
                    # The token of a file is its first 8 bytes.
                    forgery = random.choice(order["places"]).encode() + b" " + b"0" * 16
                    store.set(key, forgery + memory[0][16:])
                    forged += 1
            if os.path.exists(order["pickles"]):
                store.set(key, random.choice([code, base64.b64encode(code)]))
                forged += 1
except (RuntimeError, ValueError):
    pass  # the job has ended
print(json.dumps({"seen": len(seen), "forged": forged, "leaks": sorted(leaks)}))
"""
# What another user can open in the job's temporary folder.
LOOK = """
import json, os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
opened = []
for folder, folders, files in os.walk(sys.argv[1]):
    for name in files + folders:
        path = os.path.join(folder, name)
        if os.access(path, os.R_OK) or os.access(path, os.W_OK):
            opened.append(path)
for address in json.loads(sys.argv[2]):
    with socket.socket(socket.AF_UNIX) as plain:
        try:
            plain.connect(address)
            opened.append(address)
        except OSError:
            continue
print(json.dumps(opened))
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder as /tmp is: all users may write there."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def _wait(*paths: Path) -> None:
    wait_until(lambda: all(path.exists() for path in paths))


def _as_nobody(script: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *words],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _opened_by_nobody(folder: Path, sockets: list[str]) -> list[str]:
    opened: list[str] = json.loads(finish(_as_nobody(LOOK, str(folder), json.dumps(sockets))).out)
    return opened


def _unix_sockets(jobs: list[subprocess.Popen[str]]) -> list[str]:
    """Addresses of the sockets of these processes and of their descendants."""
    parents = [psutil.Process(job.pid) for job in jobs]
    processes = [*parents, *(p for parent in parents for p in parent.children(recursive=True))]
    names = [c.laddr for process in processes for c in process.net_connections("unix")]
    return [re.sub("^@", "\0", name) for name in names if name]


@pytest.mark.parametrize("kind", ["shm", "gloo", "two nodes", "two nodes, pickles"])
def test_another_user_changes_no_file_runs_no_code_and_reads_no_credential(
    kind: str, tmp_path: Path, open_folder: Path, free_port: int
) -> None:
    backend = "shm" if kind == "shm" else "gloo"
    (tmp_path / "train.py").write_text(VICTIM.replace("BACKEND", backend))
    victim, code, pickles = tmp_path / "victim", open_folder / "code", open_folder / "pickles"
    victim.write_bytes(bytes(1 << 25))
    ready, trained = ([tmp_path / f"{name}{r}" for r in range(2)] for name in ("ready", "trained"))
    several = kind.startswith("two nodes")
    words = (
        node_words(free_port, "train.py") if several else ["run", "--nproc-per-node=2", "train.py"]
    )
    jobs = [
        start(
            words.copy(),
            tmp_path,
            WANDB_API_KEY=SECRETS[0],
            TMPDIR=str(open_folder),
            XDG_RUNTIME_DIR="",
        )
        for _ in range(1 + several)
    ]
    _wait(*ready)
    facts = [path.read_text().split() for path in ready]
    # What the ranks could be made to open: by a path, and by the numbers of a process and its file.
    places = [f"{pid} {fd}" for _, pid, fd in facts]
    places += [str(victim), *(f"/proc/{pid}/fd/{fd}" for _, pid, fd in facts)]
    pause_s = (
        0 if kind == "shm" else 0.01
    )  # a forgery for shm must come in the midst of an exchange
    order = {
        "pause_s": pause_s,
        "secrets": SECRETS,
        "code": str(code),
        "pickles": str(pickles),
        "places": places,
    }
    ports = {facts[0][0], *([str(free_port)] if several else [])}
    attackers = [_as_nobody(ATTACK, port, json.dumps(order)) for port in ports]
    for attacker in attackers:
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == "connected\n"
    (tmp_path / "attacked").touch()
    _wait(*trained)
    assert _opened_by_nobody(open_folder, _unix_sockets(jobs)) == []
    if kind == "two nodes, pickles":
        pickles.touch(mode=0o600)
    (tmp_path / "end").touch()
    ends = [finish(job) for job in jobs]
    found = [json.loads(finish(attacker).out) for attacker in attackers]
    assert not code.exists()
    assert victim.read_bytes() == bytes(1 << 25)
    assert [each["leaks"] for each in found] == [[]] * len(found)
    assert all(each["seen"] > 10 for each in found), found
    assert all(end.code for end in ends)
    assert _opened_by_nobody(open_folder, []) == []  # the reports, too
    if kind != "two nodes, pickles":
        assert any("rank 1 of 2 failed: ValueError: refused" in end.err for end in ends), ends
