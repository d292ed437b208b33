"""Hosts for tests: network namespaces with their own addresses, host names and /etc/hosts, on one bridge."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from launching import Finished, finish, spawn

_PREFIX = "10.77.0."
_counter = itertools.count()


def missing_tool(*more: str) -> str:
    """Why hosts cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    for tool in ("ip", "unshare", *more):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    name = f"paceline-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "this system does not allow network namespaces"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


needs_hosts = pytest.mark.skipif(bool(missing_tool()), reason=missing_tool() or "-")
needs_firewall = pytest.mark.skipif(bool(missing_tool("nft")), reason=missing_tool("nft") or "-")


class Hosts:
    """Hosts node0, node1, ... with the addresses 10.77.0.1, 10.77.0.2, ... on `eth0`, joined by a bridge.

    As on Debian, /etc/hosts of each host maps its own name to 127.0.1.1, and the others are unknown.
    """

    def __init__(self, count: int, names: Mapping[int, str] | None = None) -> None:
        """Args: names: additional lines of /etc/hosts, by host."""
        self.count = count
        key = f"{os.getpid()}-{next(_counter)}"
        self.switch = f"paceline-{key}-switch"
        self._spaces = [f"paceline-{key}-{n}" for n in range(count)]
        self._running: list[subprocess.Popen[str]] = []
        try:
            self._make(names or {})
        except BaseException:
            self.close()
            raise

    def _make(self, names: Mapping[int, str]) -> None:
        self._call("ip", "netns", "add", self.switch)
        self._in_switch("link", "add", "br0", "type", "bridge")
        self._in_switch("link", "set", "br0", "up")
        for number, space in enumerate(self._spaces):
            self._call("ip", "netns", "add", space)
            peer = ["peer", "name", f"port{number}", "netns", self.switch]
            self._call("ip", "link", "add", "eth0", "netns", space, "type", "veth", *peer)
            self._in_switch("link", "set", f"port{number}", "master", "br0", "up")
            self.ip(number, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            self.ip(number, "link", "set", "eth0", "up")
            self.ip(number, "link", "set", "lo", "up")
            folder = self._folder(number)
            folder.mkdir(parents=True)
            lines = [
                "127.0.0.1 localhost",
                f"127.0.1.1 node{number}",
                names.get(number, ""),
            ]
            (folder / "hosts").write_text("\n".join(lines) + "\n")
            (folder / "resolv.conf").write_text("options timeout:1 attempts:1\n")

    def address(self, number: int) -> str:
        """The address of a host."""
        return f"{_PREFIX}{number + 1}"

    def start(self, number: int, words: list[str], cwd: Path, **more: str) -> subprocess.Popen[str]:
        """Start `paceline` with these words on a host."""
        return self.spawn(number, [sys.executable, "-m", "paceline", *words], cwd, **more)

    def spawn(
        self, number: int, command: list[str], cwd: Path, **more: str
    ) -> subprocess.Popen[str]:
        """Start any command on a host."""
        process = spawn([*self._enter(number), *command], cwd, **more)
        self._running.append(process)
        return process

    def run(
        self, words: list[str], cwd: Path, *, by_host: Mapping[int, list[str]] | None = None
    ) -> list[Finished]:
        """Run `paceline run` with these words on all hosts, and with those of `by_host` before them."""
        nodes = [
            self.start(n, ["run", *(by_host or {}).get(n, []), *words], cwd)
            for n in range(len(self._spaces))
        ]
        return [finish(node) for node in nodes]

    def remote_shell(self, folder: Path) -> str:
        """A program that runs a command on the host with an address, as `ssh ADDRESS COMMAND` does."""
        cases = [
            f'{self.address(n)}) exec {shlex.join(self._enter(n))} sh -c "$*" ;;'
            for n in range(len(self._spaces))
        ]
        options = 'while [ "${1#-}" != "$1" ]; do shift; done'
        path = folder / "ssh"
        path.write_text(
            "\n".join(["#!/bin/sh", options, "at=$1; shift", "case $at in", *cases, "esac"])
        )
        path.chmod(0o755)
        return str(path)

    def cut(self, number: int) -> None:
        """Unplug the cable of a host at the switch: its packets are lost, and no connection is closed."""
        self._in_switch("link", "set", f"port{number}", "nomaster")

    def heal(self, number: int) -> None:
        """Plug the cable in again."""
        self._in_switch("link", "set", f"port{number}", "master", "br0")

    def kill_all(self, number: int) -> None:
        """Kill all processes of a host at once, as when it loses its power."""
        words = ["ip", "netns", "pids", self._spaces[number]]
        found = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def ip(self, number: int, *words: str) -> None:
        """Run `ip` on a host."""
        self._call("ip", "-n", self._spaces[number], *words)

    def call(self, number: int, *command: str) -> str:
        """Run a short command on a host. Returns its output."""
        return self._call("ip", "netns", "exec", self._spaces[number], *command)

    def call_in_switch(self, *command: str) -> None:
        """Run a short command in the namespace of the bridge; host 3 is at its link `port3`."""
        self._call("ip", "netns", "exec", self.switch, *command)

    def _enter(self, number: int) -> list[str]:
        rename = f'hostname node{number}; exec "$@"'
        return [
            *("ip", "netns", "exec", self._spaces[number]),
            *("unshare", "--uts", "sh", "-c", rename, "sh"),
        ]

    def _folder(self, number: int) -> Path:
        return Path("/etc/netns") / self._spaces[number]  # `ip netns exec` mounts its files in /etc

    def _in_switch(self, *words: str) -> None:
        self._call("ip", "-n", self.switch, *words)

    def _call(self, *command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def close(self) -> None:
        """End what runs there, and remove the namespaces."""
        for process in self._running:
            if process.poll() is None:
                process.kill()
                process.communicate()
        for number, space in enumerate(self._spaces):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
            shutil.rmtree(self._folder(number), ignore_errors=True)
        subprocess.run(["ip", "netns", "del", self.switch], capture_output=True)


@contextlib.contextmanager
def hosts(count: int, names: Mapping[int, str] | None = None) -> Iterator[Hosts]:
    """Hosts for the time of a test."""
    made = Hosts(count, names)
    try:
        yield made
    finally:
        made.close()
