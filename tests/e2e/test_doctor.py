"""`paceline doctor` on this host, under the launcher, and over two hosts that are network namespaces."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hosts import hosts, needs_hosts
from launching import Finished, finish, start

LAUNCHED = ["run", "--nproc-per-node", "2", "-m", "paceline", "doctor", "--json"]


def _told(done: Finished) -> dict[str, Any]:
    return json.loads("\n".join(line.removeprefix("[0] ") for line in done.out.splitlines()))  # type: ignore[no-any-return]


def _levels(told: dict[str, Any]) -> dict[str, set[str]]:
    levels: dict[str, set[str]] = {}
    for finding in told["findings"]:
        levels.setdefault(finding["name"], set()).add(finding["level"])
    return levels


@pytest.mark.ci
def test_one_process_examines_this_host(tmp_path: Path) -> None:
    done, as_json = (finish(start(["doctor", *more], tmp_path)) for more in ([], ["--json"]))
    assert done.code == as_json.code == _told(as_json)["exit_code"] == 0, (done, as_json)
    lines = done.out.splitlines()
    assert any(line.startswith("ok    versions: paceline") for line in lines)
    assert any("all-reduce: 16 MiB over 2 ranks, correct sum" in line for line in lines)


@pytest.mark.ci
def test_under_the_launcher_there_is_one_report(tmp_path: Path) -> None:
    done = finish(start(LAUNCHED, tmp_path))
    assert done.code == 0, done.out + done.err
    told = _told(done)
    assert len(told["facts"]["ranks"]) == 2
    assert _levels(told)["all-reduce"] == {"ok"}


DOCTOR = ["-m", "paceline", "doctor", "--json"]


@pytest.mark.slow
@needs_hosts
def test_two_hosts_are_one_report(tmp_path: Path) -> None:
    with hosts(2) as made:
        words = ["--nnodes=2", f"--host={made.address(0)}", *DOCTOR]
        done = made.run(words, tmp_path)
        addresses = {made.address(0), made.address(1)}
    assert [each.code for each in done] == [0, 0], done
    reports = [_told(each) for each in done if each.out]
    assert len(reports) == 1, "one rank speaks"
    told = reports[0]
    levels = _levels(told)
    assert levels["network"] == levels["all-reduce"] == {"ok"}
    links = told["facts"]["links"]
    assert [(link["from"], link["to"]) for link in links] == [(0, 1), (1, 0)]
    assert {link["endpoint"]["address"] for link in links} == addresses
    assert any(", over eth0." in finding["what"] for finding in told["findings"])


@pytest.mark.slow
@needs_hosts
def test_a_name_that_resolves_to_loopback_is_found_under_torchrun(tmp_path: Path) -> None:
    with hosts(2) as made:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint={made.address(0)}:29400"]
        # torchrun needs to be told who serves, too: it compares the addresses of host names.
        told = [[f"--local-addr={made.address(n)}", f"--rdzv-conf=is_host={1 - n}"] for n in (0, 1)]
        running = [made.spawn(n, [*torchrun, *told[n], *DOCTOR], tmp_path) for n in (0, 1)]
        done = [finish(process) for process in running]
    assert [each.code for each in done] == [1, 1], done
    levels = _levels(report := next(_told(each) for each in done if each.out))
    assert "fail" in levels["host name"] & levels["all-reduce"]
    assert levels["network"] == {"ok"}
    fixes = {finding["fix"] for finding in report["findings"] if finding["name"] == "host name"}
    assert "set GLOO_SOCKET_IFNAME=eth0, or correct /etc/hosts." in fixes
