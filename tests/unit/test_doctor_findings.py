"""Findings from recorded facts, and the link from one host to another over loopback."""

from __future__ import annotations

import copy
import errno
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.doctor.facts import gather
from paceline.doctor.findings import Finding, Need, judge, render
from paceline.doctor.links import Listener, measure, rounds
from paceline.doctor.variables import interface_fits
from paceline.job.environment import RankInfo
from paceline.machine import cgroup_folders

GIB = 1 << 30
KEY = "k" * 64

# Facts of a host with two ranks and two GPUs, whose interface is eth0.
HOST: dict[str, Any] = {
    "rank": 0,
    "local_rank": 0,
    "local_world_size": 2,
    "host": "a",
    "variables": {},
    "device": {"index": 0, "missing": False, "uuid": "u0", "name": "H", "used": 0, "total": GIB},
    "versions": {"python": "3.11.7", "torch": "2.13.0", "cuda": "12.8", "driver": "570.1"},
    "cores": 8,
    "cores_of_host": 16,
    "memory_limit": None,
    "memory_kills": 0,
    "shm_size": 32 * GIB,
    "shm_free": 30 * GIB,
    "gpus": 2,
    "infiniband": ["mlx5_0"],
    "interfaces": {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]},
    "addresses": ["10.0.0.1"],
    "port_owner": None,
    "ephemeral_ports": [32768, 60999],
    "folder": None,
}
LINK: dict[str, Any] = {
    "from": 0,
    "to": 2,
    "endpoint": {"address": "10.0.0.2", "ephemeral": 41000, "fixed": 29501},
    "fixed": "",
    "ephemeral": "",
    "from_address": "10.0.0.1",
    "resolved": ["10.0.0.2"],
    "latency_s": 1e-4,
    "clock_s": 0.001,
    "bytes_per_s": 1e9,
}
REDUCE = {"right": True, "world_size": 4, "seconds": 0.02, "bytes": 16 << 20}


def _two_hosts() -> dict[str, Any]:
    ranks = []
    for rank in range(4):
        facts = copy.deepcopy(HOST)
        facts |= {"rank": rank, "local_rank": rank % 2, "host": "ab"[rank // 2]}
        facts["device"]["uuid"] = f"u{rank}"
        facts["interfaces"]["eth0"] = facts["addresses"] = [f"10.0.0.{rank // 2 + 1}"]
        ranks.append(facts)
    there = copy.deepcopy(LINK)
    back = there | {"from": 2, "to": 0, "from_address": "10.0.0.2", "resolved": ["10.0.0.1"]}
    reduce = [dict(REDUCE) for _ in ranks]
    return {"ranks": ranks, "links": [there, back], "reduce": reduce, "shared": None}


def _wrong(found: dict[str, Any], need: Need | None = None) -> list[Finding]:
    return [f for f in judge(found, need or Need()) if f.level != "ok"]


def test_two_sound_hosts_are_ok_on_every_subject() -> None:
    findings = judge(_two_hosts(), Need(workers=3, batch_bytes=1 << 20))
    assert {finding.level for finding in findings} == {"ok"}
    subjects = {"versions", "devices", "cores", "shared memory", "host name", "network"}
    assert {finding.name for finding in findings} == subjects | {"all-reduce"}
    assert all(finding.what.endswith(".") for finding in findings)
    network = next(finding.what for finding in findings if finding.name == "network")
    assert network == (
        "2 of 2 links between hosts work, 0.10 to 0.10 ms, 1.00 GB/s to 1.00 GB/s, over eth0."
    )


# A path in the facts, its new value, and the level and text of the one finding that results.
CHANGES = [
    ("ranks.2.versions.torch", "2.12.0", "fail", "torch differs: 2.13.0 on a, 2.12.0 on b."),
    ("ranks.2.versions.driver", "560.0", "warn", "driver differs: 570.1 on a, 560.0 on b."),
    ("ranks.1.device.missing", True, "fail", "a shows 2 GPUs to 2 ranks."),
    ("ranks.1.device.uuid", "u0", "fail", "ranks of a share a GPU."),
    ("ranks.0.device.used", GIB, "warn", "GPU 0 of a has 1.0 GiB in use already."),
    ("ranks.0.cores", 1, "warn", "a has 1 usable core of 16 for 2 ranks."),
    ("ranks.0.memory_kills", 2, "warn", "2 processes ran out of memory in the container of a."),
    (
        "ranks.2.shm_size",
        64 << 20,
        "warn",
        "/dev/shm of b has 30.0 GiB free of 64 MiB: little for loader workers and NCCL.",
    ),
    (
        "ranks.2.addresses",
        ["127.0.1.1"],
        "fail",
        "the name b resolves to 127.0.1.1 on b; over several hosts Gloo would connect to itself.",
    ),
    (
        "ranks.0.port_owner",
        "pid 812 (python old.py), started 3 h ago",
        "warn",
        "port 29500, torch's usual one, is in use on a by pid 812 (python old.py), started 3 h ago.",
    ),
    ("ranks.0.ephemeral_ports", [60000, 60100], "warn", "a has only 100 ephemeral ports."),
    (
        "links.1.ephemeral",
        "timed out",
        "fail",
        "b cannot reach a at 10.0.0.2:41000 (an ephemeral port): timed out.",
    ),
    (
        "links.0.fixed",
        "[Errno 111] Connection refused",
        "fail",
        "a cannot reach b at 10.0.0.2:29501 (29500-29550): [Errno 111] Connection refused.",
    ),
    ("links.0.clock_s", -90.0, "warn", "the clocks of a and b differ by 90.0 s."),
    (
        "links.0.resolved",
        ["127.0.1.1"],
        "warn",
        "on a the name b resolves to 127.0.1.1, which is not an address of b.",
    ),
    ("reduce.3.right", False, "fail", "the sum is wrong."),
    ("reduce.2.error", "bang\nmore", "fail", "it failed: bang"),
    (
        "ranks.0.folder",
        {"path": "/runs", "error": "Read-only file system"},
        "fail",
        "/runs on a cannot be written to: Read-only file system.",
    ),
    (
        "ranks.0.folder",
        {"path": "/runs", "bytes_per_s": 2e7, "free": GIB},
        "warn",
        "/runs on a: 1.0 GiB free, 20 MB/s to durable storage: slow.",
    ),
]

# Each begins with the variable and its value.
VARIABLES = """
NCCL_SOCKET_IFNAME=ib0 matches no interface.
NCCL_P2P_DISABLE=1: GPUs of one host communicate through the host's memory.
NCCL_IB_DISABLE=1 leaves mlx5_0 unused.
OMP_NUM_THREADS=8, while 8 cores are usable for 2 ranks.
CUDA_VISIBLE_DEVICES=0,1,2 lists 3 GPUs, torch sees 2.
TORCH_DISTRIBUTED_DEBUG=DETAIL adds a check to each collective, which costs speed.
"""
for _text in VARIABLES.strip().splitlines():
    _name, _, _value = _text.split()[0].strip(",:").partition("=")
    CHANGES.append(("ranks.2.variables", {_name: _value}, "warn", f"b: {_text}"))


@pytest.mark.parametrize(("where", "value", "level", "what"), CHANGES)
def test_each_fault_makes_one_finding(where: str, value: Any, level: str, what: str) -> None:
    found = _two_hosts()
    *path, last = where.split(".")
    place: Any = found
    for part in path:
        place = place[int(part)] if part.isdigit() else place[part]
    place[last] = value
    wrong = _wrong(found)
    assert [(finding.level, finding.what) for finding in wrong] == [(level, what)]
    assert wrong[0].fix


def test_a_name_that_leads_to_loopback_first_is_a_fault_only_for_several_hosts() -> None:
    found = _two_hosts()
    found["ranks"][2]["addresses"] = ["127.0.1.1", "10.0.0.2"]  # Gloo takes the first one
    (wrong,) = _wrong(found)
    assert (wrong.level, wrong.fix) == (
        "fail",
        "set GLOO_SOCKET_IFNAME=eth0, or correct /etc/hosts.",
    )
    alone = found | {"ranks": found["ranks"][2:], "links": [], "reduce": [REDUCE]}
    assert [finding.level for finding in _wrong(alone)] == ["warn"]
    found["ranks"][2]["addresses"] = ["10.0.0.2", "127.0.1.1"]
    assert _wrong(found) == []


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"GLOO_SOCKET_IFNAME": "lo"}, "a: GLOO_SOCKET_IFNAME=lo cannot reach other hosts."),
        ({"NCCL_SOCKET_IFNAME": "^eth"}, "a reaches b through eth0, but NCCL_SOCKET_IFNAME=^eth."),
    ],
)
def test_an_interface_that_does_not_reach_the_peers(values: dict[str, str], what: str) -> None:
    found = _two_hosts()
    found["ranks"][0]["variables"] = values
    assert what in [finding.what for finding in _wrong(found)]


def test_a_way_that_is_slower_than_the_others() -> None:
    found = _two_hosts()
    found["links"] += copy.deepcopy(found["links"])
    found["links"][0]["bytes_per_s"] = 1e8
    wrong = _wrong(found)
    assert [f.what for f in wrong] == ["a to b carries 0.10 GB/s, others 1.00 GB/s."]


def test_a_run_folder_that_a_host_does_not_share() -> None:
    found = _two_hosts()
    for rank in (0, 2):
        found["ranks"][rank]["folder"] = {"path": "/runs", "bytes_per_s": 1e9, "free": GIB}
    found["shared"] = [True, True, False, False]
    assert [f.what for f in _wrong(found)] == [
        "/runs on b does not have the file that rank 0 wrote."
    ]


def test_the_need_of_loaders_is_held_against_shm_and_cores() -> None:
    found = _two_hosts()
    wrong = _wrong(found, Need(workers=8, batch_bytes=GIB))
    assert [(finding.name, finding.level) for finding in wrong] == [
        ("cores", "warn"),
        ("shared memory", "fail"),
        ("cores", "warn"),
        ("shared memory", "fail"),
    ]
    assert "may need 32.0 GiB" in wrong[1].what  # 2 ranks x 8 workers x 2 batches ahead x 1 GiB


def test_an_error_of_the_all_reduce_gets_the_fix_of_the_table() -> None:
    found = _two_hosts()
    found["reduce"][0] = {"error": "Gloo connectFullMesh failed with: remote=[127.0.0.1]:1"}
    assert "GLOO_SOCKET_IFNAME" in _wrong(found)[0].fix


def test_containers_of_one_name_are_told_apart() -> None:
    found = _two_hosts()
    found["ranks"][2]["host"] = "a"
    found["links"][0]["ephemeral"] = "timed out"
    assert _wrong(found)[0].what.startswith("a (rank 0) cannot reach a (rank 2)")


def test_what_is_wrong_comes_first_and_what_is_well_once() -> None:
    found = _two_hosts()
    found["ranks"][2]["memory_kills"] = 1
    lines = render(judge(found, Need())).splitlines()
    assert lines[0] == "warn  memory: 1 process ran out of memory in the container of b."
    assert lines[1].startswith("      fix: ")
    assert "ok    devices: a: 2 x H. (and 1 more)" in lines
    assert len([line for line in lines if "devices" in line]) == 1


@pytest.mark.parametrize(
    ("variable", "value", "fits"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "ib0,eth0", True),
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "=eth0", True),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", True),
        ("NCCL_SOCKET_IFNAME", "^eth", False),
        ("NCCL_SOCKET_IFNAME", "^=eth", True),
    ],
)
def test_interfaces_are_named_as_gloo_and_nccl_do(variable: str, value: str, fits: bool) -> None:
    assert interface_fits(variable, value, "eth0") is fits


def test_a_link_between_hosts_is_measured() -> None:
    listener = Listener("127.0.0.1", KEY)
    try:
        link = measure(listener.endpoint, KEY, "localhost")
        refused = measure(listener.endpoint, "w" * 64, "localhost")
    finally:
        listener.close()
    assert (link["fixed"], link["ephemeral"], link["from_address"]) == ("", "", "127.0.0.1")
    assert 29500 <= listener.endpoint["fixed"] <= 29550
    assert 0 < link["latency_s"] < 1
    assert abs(link["clock_s"]) < 1
    assert link["bytes_per_s"] > 1e6
    assert "127.0.0.1" in link["resolved"]
    # A client with another key gets no answer.
    assert refused["ephemeral"]
    assert "latency_s" not in refused


def test_a_client_that_says_nothing_does_not_delay_the_end() -> None:
    listener = Listener("127.0.0.1", KEY)
    address = ("127.0.0.1", listener.endpoint["ephemeral"])
    with socket.create_connection(address) as silent:
        silent.sendall(KEY.encode() + b"p")
        assert silent.recv(8)  # it is being answered, for 30 s
        ending = threading.Thread(target=listener.close, daemon=True)
        ending.start()
        ending.join(10)
        assert not ending.is_alive()


def test_failed_accepts_are_not_repeated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[float] = []

    def too_many_open_files(self: socket.socket) -> None:
        failed.append(time.perf_counter())
        raise OSError(errno.EMFILE, "Too many open files")

    listener = Listener("127.0.0.1", KEY)
    monkeypatch.setattr(socket.socket, "accept", too_many_open_files)
    with socket.create_connection(("127.0.0.1", listener.endpoint["ephemeral"])):
        while len(failed) < 10:
            time.sleep(0.01)
        listener.close()
    assert failed[9] - failed[0] > 0.08  # nine pauses of 10 ms


def test_a_port_that_nobody_opened_is_a_fact() -> None:
    listener = Listener("127.0.0.1", KEY)
    listener.close()
    link = measure(listener.endpoint, KEY, "no-such-host.invalid")
    assert "refused" in link["fixed"]
    assert "refused" in link["ephemeral"]
    assert link["resolved"] == []


def test_no_host_is_asked_by_two_in_one_round() -> None:
    for size in range(2, 7):
        for asked in zip(*(rounds(size, me) for me in range(size)), strict=True):
            assert sorted(asked) == list(range(size))


ALONE = RankInfo(launcher="none", rank=0, world_size=1, local_rank=0, local_world_size=1)


def test_facts_of_this_host_can_travel_as_json(tmp_path: Path) -> None:
    facts = json.loads(json.dumps(gather(ALONE, tmp_path)))
    assert set(HOST) <= set(facts)
    assert facts["folder"]["bytes_per_s"] > 0
    assert not list(tmp_path.iterdir())
    assert "127.0.0.1" in facts["interfaces"]["lo"]


def test_a_folder_that_cannot_be_is_a_fact(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert gather(ALONE, tmp_path / "file")["folder"]["error"]


def test_groups_of_both_kinds_of_cgroups_are_found(tmp_path: Path) -> None:
    member = tmp_path / "cgroup"
    member.write_text("5:memory:/job\n0::/user\n")
    folders = cgroup_folders("memory", member, tmp_path)
    assert tmp_path / "memory" / "job" in folders
    assert tmp_path / "user" in folders
    assert tmp_path / "unified" / "user" in folders
