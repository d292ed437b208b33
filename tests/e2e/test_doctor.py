"""`paceline doctor` on this host, under the launcher, and over two hosts that are network namespaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import Finished, finish, spawn, start

LAUNCHED = ["run", "--nproc-per-node", "2", "-m", "paceline", "doctor", "--json"]
HOSTS = {"a": "10.77.61.1", "b": "10.77.61.2"}


def _told(done: Finished) -> dict[str, Any]:
    return json.loads("\n".join(line.removeprefix("[0] ") for line in done.out.splitlines()))  # type: ignore[no-any-return]


def _levels(told: dict[str, Any]) -> dict[str, set[str]]:
    levels: dict[str, set[str]] = {}
    for finding in told["findings"]:
        levels.setdefault(finding["name"], set()).add(finding["level"])
    return levels


def test_one_process_examines_this_host(tmp_path: Path) -> None:
    done = finish(start(["doctor", "--folder", str(tmp_path / "runs")], tmp_path))
    assert done.code == 0, done.out + done.err
    lines = done.out.splitlines()
    assert any(line.startswith("ok    versions: paceline") for line in lines)
    assert any("all-reduce: 16 MiB over 2 ranks, correct sum" in line for line in lines)
    assert any(f"folder: {tmp_path / 'runs'}" in line for line in lines)
    assert list((tmp_path / "runs").iterdir()) == []


def test_what_fails_is_in_the_exit_code(tmp_path: Path) -> None:
    # No /dev/shm holds a batch of an exbibyte.
    words = ["doctor", "--workers", "1", "--batch-mib", "1e12", "--json"]
    done = finish(start(words, tmp_path))
    told = _told(done)
    assert done.code == told["exit_code"] == 1
    assert _levels(told)["shared memory"] == {"fail"}


def test_under_the_launcher_there_is_one_report(tmp_path: Path) -> None:
    done = finish(start(LAUNCHED, tmp_path))
    assert done.code == 0, done.out + done.err
    told = _told(done)
    assert len(told["facts"]["ranks"]) == 2
    assert _levels(told)["all-reduce"] == {"ok"}


@pytest.fixture
def two_hosts() -> Iterator[None]:
    """Two network namespaces with a cable between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and `ip`, for hosts of its own")
    spaces = {name: f"paceline-{os.getpid()}-{name}" for name in HOSTS}
    made = subprocess.run(["ip", "netns", "add", spaces["a"]], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    try:
        _ip("netns", "add", spaces["b"])
        cable = ["type", "veth", "peer", "name", "cable", "netns", spaces["b"]]
        _ip("link", "add", "cable", "netns", spaces["a"], *cable)
        for name, space in spaces.items():
            _ip("-n", space, "addr", "add", f"{HOSTS[name]}/24", "dev", "cable")
            for link in ("lo", "cable"):
                _ip("-n", space, "link", "set", link, "up")
        yield
    finally:
        for space in spaces.values():
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _on_both(tmp_path: Path, **more: str) -> list[Finished]:
    """What `paceline run ... -m paceline doctor` says on each of the hosts."""
    words = ["run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", f"{HOSTS['a']}:29400", "--rdzv-id", "1"]
    words += ["-m", "paceline", "doctor", "--json", "--folder", str(tmp_path)]
    running = [
        spawn(
            ["ip", "netns", "exec", f"paceline-{os.getpid()}-{name}", sys.executable]
            + ["-m", "paceline", *words],
            tmp_path,
            **more,
        )
        for name in HOSTS
    ]
    return [finish(process) for process in running]


@pytest.mark.slow
def test_two_hosts_are_one_report(tmp_path: Path, two_hosts: None) -> None:
    done = _on_both(tmp_path, GLOO_SOCKET_IFNAME="cable")
    assert [each.code for each in done] == [0, 0], done
    reports = [_told(each) for each in done if each.out]
    assert len(reports) == 1, "one rank speaks"
    told = reports[0]
    levels = _levels(told)
    assert levels["network"] == levels["all-reduce"] == {"ok"}
    links = told["facts"]["links"]
    assert [(link["from"], link["to"]) for link in links] == [(0, 1), (1, 0)]
    assert {link["endpoint"]["address"] for link in links} == set(HOSTS.values())
    assert any(", over cable." in finding["what"] for finding in told["findings"])


@pytest.mark.slow
def test_a_name_that_resolves_to_loopback_is_found_with_its_fix(
    tmp_path: Path, two_hosts: None
) -> None:
    names = subprocess.run(
        ["getent", "ahosts", os.uname().nodename], capture_output=True, text=True
    )
    if not all(line.startswith(("127.", "::1")) for line in names.stdout.splitlines()):
        pytest.skip("this host's name resolves to an address of its own")
    done = _on_both(tmp_path)
    assert [each.code for each in done] == [1, 1], done
    told = next(_told(each) for each in done if each.out.startswith("[0] {"))
    levels = _levels(told)
    assert "fail" in levels["host name"] & levels["all-reduce"]
    assert levels["network"] == {"ok"}
    fixes = {finding["fix"] for finding in told["findings"] if finding["name"] == "host name"}
    assert fixes == {"set GLOO_SOCKET_IFNAME=cable, or correct /etc/hosts."}
