"""Hosts for benchmarks: network namespaces on one bridge, joined by links of a chosen rate.

    with hosts(2, rate="100mbit") as made:
        ends = made.run(["--nnodes=2", f"--host={made.address(0)}", "train.py"], folder)

    python benchmarks/links.py [--rate 1gbit]    # what a link of this rate really carries

Root only, with `ip` and `tc` of iproute2. The namespaces are those of `tests/e2e/hosts.py`; here `tc` shapes
them with a token bucket (tbf), on both ends of each cable: a host sends and receives at most at this rate, in
each direction, however many others send to it. Everything is removed at the end, also after an error, Ctrl-C
or SIGTERM. netem is not part of every kernel and is not used, so the latency of a link is that of a veth
pair, some ten microseconds. The first `BURST_KB` of a message pass at once: measure with larger ones.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "e2e"))
from hosts import Hosts, missing_tool
from launching import finish, start, unused_port
from tables import publish

__all__ = ["LinkedHosts", "finish", "hosts", "start", "unused_port"]

BURST_KB = 128  # above a segment of 64 kB, which tbf would otherwise cut


class LinkedHosts(Hosts):
    """Hosts whose links have a rate."""

    def shape(self, rate: str) -> None:
        """Give all links this rate, as `tc` writes it: "100mbit", "1gbit"."""
        # A queue of 50 ms, as of a router: a shorter one drops packets, and TCP does not reach the rate.
        words = ["root", "tbf", "rate", rate, "burst", f"{BURST_KB}kb", "latency", "50ms"]
        for number in range(self.count):
            self.call(number, "tc", "qdisc", "replace", "dev", "eth0", *words)
            self.call_in_switch("tc", "qdisc", "replace", "dev", f"port{number}", *words)

    def sent_bytes(self, number: int) -> int:
        """Bytes that a host has sent since it exists, with their headers, and without its loopback."""
        return int(self.call(number, "cat", "/sys/class/net/eth0/statistics/tx_bytes"))


@contextmanager
def hosts(count: int, rate: str | None = None) -> Iterator[LinkedHosts]:
    """`count` hosts, with links of this rate, or as fast as the machine.

    `made.start(i, words, folder)` starts `paceline` on host i, `made.spawn(i, command, folder)` any command,
    `made.run(words, folder)` runs `paceline run` on all; `made.cut(i)` unplugs a host and `made.heal(i)`
    plugs it in again.

    Raises:
        SystemExit: this process cannot make them; the message says why.
    """
    if why := missing_tool("tc"):
        raise SystemExit(f"no hosts for this benchmark: {why}.")

    def terminate(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        made = LinkedHosts(count)
        try:
            if rate is not None:
                made.shape(rate)
            yield made
        finally:
            made.close()
    finally:
        signal.signal(signal.SIGTERM, before)


_SIZE = 16 << 20


def _receive(address: str) -> None:
    with socket.create_server((address, 9000)) as server:
        print("listening", flush=True)
        connection = server.accept()[0]
        for size in (1 << 20, _SIZE - (1 << 20)):  # TCP reaches the rate within the first MiB
            left, began = size, time.perf_counter()
            while left:
                left -= len(connection.recv(min(left, 1 << 20)))
        print(size * 8e-6 / (time.perf_counter() - began))


def measure(rate: str) -> dict[str, Any]:
    """Megabits per second of one TCP connection between two hosts."""
    with hosts(2, rate) as made:
        words = [sys.executable, __file__, "--receive", made.address(0)]
        receiver = made.spawn(0, words, Path.cwd())
        assert receiver.stdout is not None
        receiver.stdout.readline()
        send = f"import socket; socket.create_connection(('{made.address(0)}', 9000)).sendall"
        finish(made.spawn(1, [sys.executable, "-c", f"{send}(bytes({_SIZE}))"], Path.cwd()))
        carried = float(finish(receiver).out)
        return {"rate": rate, "mbit_per_s": carried, "sent_bytes": made.sent_bytes(1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", nargs="+", default=["100mbit", "1gbit", "10gbit"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        _receive(options.receive)
    else:
        publish("links", [measure(rate) for rate in options.rate], as_json=options.json)


if __name__ == "__main__":
    main()
