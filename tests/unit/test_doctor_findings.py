"""Findings from recorded facts, and connections from one host to another over loopback."""

from __future__ import annotations

import copy
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from paceline.doctor.examine import connect, facts_of
from paceline.doctor.findings import Finding, interface_fits, judge, render
from paceline.job.environment import RankInfo
from paceline.machine import cgroup_folders

GIB = 1 << 30

# Facts of a host with two ranks and two GPUs, whose interface is eth0.
HOST: dict[str, Any] = {
    "rank": 0,
    "local_rank": 0,
    "local_world_size": 2,
    "host": "a",
    "variables": {},
    "device": {"index": 0, "missing": False, "uuid": "u0", "name": "H", "used": 0, "total": GIB},
    "versions": {"python": "3.11.7", "torch": "2.13.0", "cuda": "12.8", "driver": "570.1"},
    "shm_size": 32 * GIB,
    "shm_free": 30 * GIB,
    "gpus": 2,
    "interfaces": {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]},
    "addresses": ["10.0.0.1"],
}
LINK: dict[str, Any] = {
    "from": 0,
    "to": 2,
    "endpoint": {"address": "10.0.0.2", "ephemeral": 41000, "fixed": 29501},
    "fixed": "",
    "ephemeral": "",
    "from_address": "10.0.0.1",
    "resolved": ["10.0.0.2"],
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
    return {"ranks": ranks, "links": [there, back], "reduce": reduce}


def _wrong(found: dict[str, Any]) -> list[Finding]:
    return [f for f in judge(found) if f.level != "ok"]


def test_two_sound_hosts_are_ok_on_every_subject() -> None:
    findings = judge(_two_hosts())
    assert {finding.level for finding in findings} == {"ok"}
    subjects = {"versions", "devices", "shared memory", "host name", "network", "all-reduce"}
    assert {finding.name for finding in findings} == subjects
    assert all(finding.what.endswith(".") for finding in findings)
    network = next(finding.what for finding in findings if finding.name == "network")
    assert network == "2 links between hosts work, over eth0."


# A path in the facts, its new value, and the level and text of the one finding that results.
CHANGES = [
    ("ranks.2.versions.torch", "2.12.0", "fail", "torch differs: 2.13.0 on a, 2.12.0 on b."),
    ("ranks.2.versions.driver", "560.0", "warn", "driver differs: 570.1 on a, 560.0 on b."),
    ("ranks.1.device.missing", True, "fail", "a shows 2 GPUs to 2 ranks."),
    (
        "ranks.1.device",
        {"index": 1, "missing": True, "error": "CUDA error: devices unavailable"},
        "fail",
        "GPU 1 of a cannot be used: CUDA error: devices unavailable",
    ),
    ("ranks.1.device.uuid", "u0", "fail", "ranks of a share a GPU."),
    ("ranks.0.device.used", GIB, "warn", "GPU 0 of a has 1.0 GiB in use already."),
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
    (
        "links.0.resolved",
        ["127.0.1.1"],
        "warn",
        "on a the name b resolves to 127.0.1.1, which is not an address of b.",
    ),
    ("reduce.3.right", False, "fail", "the sum is wrong."),
    ("reduce.2.error", "bang\nmore", "fail", "it failed: bang"),
    (
        "ranks.2.variables",
        {"NCCL_SOCKET_IFNAME": "ib0"},
        "fail",
        "b: NCCL_SOCKET_IFNAME=ib0 matches no interface.",
    ),
]


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


def test_an_error_of_the_all_reduce_gets_the_fix_of_the_table() -> None:
    found = _two_hosts()
    found["reduce"][0] = {"error": "Gloo connectFullMesh failed with: remote=[127.0.0.1]:1"}
    assert "GLOO_SOCKET_IFNAME" in _wrong(found)[0].fix


def test_containers_of_one_name_are_told_apart() -> None:
    found = _two_hosts()
    found["ranks"][2]["host"] = "a"
    found["links"][0]["ephemeral"] = "timed out"
    assert _wrong(found)[0].what.startswith("a (rank 0) cannot reach a (rank 2)")


def test_failures_are_listed_before_ok_findings() -> None:
    found = _two_hosts()
    found["ranks"][2]["shm_size"] = 1
    lines = render(judge(found)).splitlines()
    assert lines[0].startswith("warn  shared memory: /dev/shm of b ")
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


def test_a_peer_is_reached_on_the_ports_on_which_it_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as open_port, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        ports = {"fixed": closed.getsockname()[1], "ephemeral": open_port.getsockname()[1]}
        link = connect({"address": "127.0.0.1", **ports})
    assert (link["ephemeral"], link["from_address"]) == ("", "127.0.0.1")
    assert "refused" in link["fixed"]
    none = {"address": "", "fixed": None, "ephemeral": None}
    assert connect(none)["fixed"] == "the peer could not listen there"


ALONE = RankInfo(launcher="none", rank=0, world_size=1, local_rank=0, local_world_size=1)


def test_facts_of_this_host_can_travel_as_json() -> None:
    facts = json.loads(json.dumps(facts_of(ALONE)))
    assert set(HOST) == set(facts)
    assert "127.0.0.1" in facts["interfaces"]["lo"]


def test_groups_of_both_kinds_of_cgroups_are_found(tmp_path: Path) -> None:
    member = tmp_path / "cgroup"
    member.write_text("5:memory:/job\n0::/user\n")
    folders = cgroup_folders("memory", member, tmp_path)
    assert tmp_path / "memory" / "job" in folders
    assert tmp_path / "user" in folders
    assert tmp_path / "unified" / "user" in folders
