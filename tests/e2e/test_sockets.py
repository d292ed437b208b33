"""Who can reach a job: what listens, and what is done with frames that nobody of ours has sent."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

import psutil
import pytest
from hangs import PACELINE
from launching import finish, run, start

from paceline.launch.local_ranks import read_event

WAITS = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
print("ready", flush=True)
while not os.path.exists("looked"):
    time.sleep(0.01)
"""


def _listening(pids: list[int]) -> dict[int, set[str]]:
    """Addresses that each of these processes listens on, or takes datagrams at."""
    found: dict[int, set[str]] = {pid: set() for pid in pids}
    rows = [
        line.split()
        for name in ("tcp", "tcp6", "udp", "udp6")
        if (table := Path(f"/proc/net/{name}")).exists()
        for line in table.read_text().splitlines()[1:]
    ]
    owners = {
        os.readlink(fd.path)[8:-1]: pid
        for pid in pids
        for fd in os.scandir(f"/proc/{pid}/fd")
        if os.readlink(fd.path).startswith("socket:[")
    }
    for row in rows:
        if row[9] in owners and row[3] in ("0A", "07"):
            # Words of the host's byte order.
            data = bytes.fromhex(row[1].partition(":")[0])
            words = [data[at : at + 4][::-1] for at in range(0, len(data), 4)]
            found[owners[row[9]]].add(str(ipaddress.ip_address(b"".join(words))))
    return found


@pytest.mark.slow
def test_a_job_on_one_host_listens_on_the_loopback_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PACELINE.replace("BACKEND", "gloo") + WAITS)
    process = start(["run", "--nproc-per-node=2", "train.py"], tmp_path)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)].count("") == 0
    launcher = psutil.Process(process.pid)
    found = _listening([each.pid for each in (launcher, *launcher.children(recursive=True))])
    (tmp_path / "looked").touch()
    assert finish(process).code == 0
    places = [ipaddress.ip_address(place) for each in found.values() for place in each]
    assert all(place.is_loopback for place in places), found
    assert len([each for each in found.values() if each]) == 3, found  # the store, and Gloo in two


ERROR = {
    "type": "ValueError",
    "kinds": ["builtins.ValueError"],
    "message": "told by nobody",
    "traceback": "",
    "module": "m",
    "place": "p",
    "lost_peer": False,
    "masked": False,
    "causes": "",
    "shown": False,
}
EVENT = {"event": "final_error", "error": ERROR, "time": 1.0, "step": 0}

SENDS_GARBAGE = """
import json, os, random
fd = int(os.environ["PACELINE_CONTROL_FD"])
draw, event = random.Random(7), EVENT
kinds = {name: type(value) for name, value in event.items()} | {"time": (int, float)}
kinds_of_error = {name: type(value) for name, value in event["error"].items()}
if os.environ["RANK"] == "0":
    import time
    time.sleep(600)
for number in range(COUNT):
    frame = draw.randbytes(draw.randrange(300))
    if number % 3 == 0:
        wrong = draw.choice([None, 7, [], {}, "x" * 300, [[]], -1e400])
        name = draw.choice([name for name in event if not isinstance(wrong, kinds[name])])
        in_error = [name for name in event["error"] if not isinstance(wrong, kinds_of_error[name])]
        bad = {"error": event["error"] | {draw.choice(in_error): wrong}}
        frame = json.dumps(event | draw.choice([{name: wrong}, bad])).encode()
    elif number % 3 == 1:
        answer = b'{"event": "state", "id": -1, "entries": [1]}'
        frame = draw.choice([b"[" * 5000, b'{"event": []}', answer, b"NaN", frame])
    os.write(fd, frame + b"\\n" * draw.randrange(2))
raise ValueError("the real one")
"""


@pytest.mark.parametrize("count", [3_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.ci
def test_a_rank_that_sends_garbage_crashes_nothing(tmp_path: Path, count: int) -> None:
    script = SENDS_GARBAGE.replace("EVENT", repr(EVENT)).replace("COUNT", str(count))
    done = run("--nproc-per-node=2", script, tmp_path)
    assert done.code == 1
    assert "paceline: rank 1 of 2 failed: ValueError: the real one" in done.err.splitlines()
    assert "told by nobody" not in done.err
    assert done.err.count("Traceback") == 1, done.err


def test_an_event_is_what_worker_sends() -> None:
    assert read_event(b'{"event": "exit", "place": "train.py:4"}') is not None
    for line in (
        b"",
        b"[]",
        b"7",
        b'{"event": "final_error"}',
        b'{"event": "exit", "place": 3}',
        b"\xff",
    ):
        assert read_event(line) is None
    assert read_event(b"[" * 100_000) is None
