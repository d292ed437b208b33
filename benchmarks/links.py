"""Hosts for benchmarks: network namespaces on one bridge, joined by links of a chosen rate.

    with hosts(2, rate="100mbit") as made:
        ends = made.run(["--nnodes=2", f"--host={made.address(0)}", "train.py"], folder)

Root only, with `ip` and `tc` of iproute2. The namespaces are those of `tests/e2e/hosts.py`; here `tc` shapes
them with a token bucket (tbf), on both ends of each cable: a host sends and receives at most at this rate, in
each direction, however many others send to it. Everything is removed at the end, also after an error, Ctrl-C
or SIGTERM. netem is not part of every kernel and is not used, so the latency of a link is that of a veth
pair, some ten microseconds. The first `BURST_KB` of a message pass at once: measure with larger ones.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "e2e"))
from hosts import Hosts, missing_tool
from launching import finish, start, unused_port

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


def sent_bytes() -> int:
    """Bytes that the host of this process has sent to others, with headers; 0 without a link of its own."""
    path = Path("/sys/class/net/eth0/statistics/tx_bytes")
    return int(path.read_text()) if path.exists() else 0


def start_worker(made: LinkedHosts, number: int, words: list[str], out: Path) -> Any:
    """Start `paceline run` on a host; the script gets `--worker=OUT`, where rank 0 writes its result."""
    more = {"PACELINE_BACKEND": "gloo", "OMP_NUM_THREADS": "1"}
    words = ["run", f"--host={made.address(0)}", *words, f"--worker={out}"]
    return made.start(number, words, out.parent, **more)


def read_result(ends: list[Any], out: Path) -> Any:
    """What rank 0 has written.

    Raises:
        SystemExit: a process failed; with what all have printed.
    """
    if any(end.code for end in ends):
        raise SystemExit("".join(end.err for end in ends))
    return json.loads(out.read_text())
