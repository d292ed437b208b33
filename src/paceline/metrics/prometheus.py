"""An endpoint that Prometheus scrapes. A front to the package `prometheus_client`."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from paceline.errors import ConfigError
from paceline.metrics.logger import Values, require


class Prometheus:
    """Serves the metrics of all ranks on rank 0, at `http://address:port/metrics`.

    Metrics: `paceline_step`, `paceline_steps_total`, `paceline_samples_total`,
    `paceline_phase_seconds_total{phase,rank}`, `paceline_memory_bytes{rank}`, `paceline_busy{rank}` (cores in
    use, or the share of time that the GPU was busy), `paceline_value{name}` for each logged value, and
    `paceline_restarts`. See [monitoring](../howto/monitoring.md).

    Args:
        port: TCP port, which must be free on this host; 0 lets the system choose one.
        address: Where it listens. None is the address of the interface that the job uses between hosts,
            which is the loopback interface in a job of one host. There is no password, and each connection
            takes a thread of rank 0: do not choose an address that untrusted networks reach.

    Raises:
        ConfigError: prometheus_client is not installed, or the port is not from 0 to 65535.

    Collective: none.
    """

    def __init__(self, port: int = 9400, address: str | None = None) -> None:
        require("prometheus_client", extra="prometheus")
        if not (type(port) is int and 0 <= port < 2**16):
            raise ConfigError(f"port must be a number from 0 to 65535, got {port!r}.")
        self.port = port
        self.address = address
        self._server: Any = None

    def _start(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

        registry = CollectorRegistry()
        rank = ["rank"]
        self._step = Gauge("paceline_step", "Number of the last step", registry=registry)
        self._steps = Counter("paceline_steps", "Steps since the start", registry=registry)
        self._samples = Counter("paceline_samples", "Samples of all ranks", registry=registry)
        self._phases = Counter(
            "paceline_phase_seconds", "Time in each phase", ["phase", "rank"], registry=registry
        )
        self._memory = Gauge("paceline_memory_bytes", "Memory in use", rank, registry=registry)
        self._busy = Gauge(
            "paceline_busy", "Cores in use, or share of the GPU", rank, registry=registry
        )
        self._values = Gauge("paceline_value", "A logged value", ["name"], registry=registry)
        restarts = Gauge("paceline_restarts", "Restarts by the launcher", registry=registry)
        restarts.set(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
        address = self.address or _address_of_job()
        self._server, _ = start_http_server(self.port, address, registry)
        self.address, self.port = self._server.server_address[:2]

    def log(self, step: int, values: Values) -> None:
        """Show the values of a step."""
        if self._server is None:
            self._start()
        self._step.set(step)
        for name, value in values.items():
            self._values.labels(name).set(value)

    def times(self, step: int, line: Mapping[str, Any]) -> None:
        """Show where the time of the last steps went; see `Logger.times`."""
        if self._server is None:
            self._start()
        self._step.set(step)
        self._steps.inc(line["steps"])
        self._samples.inc(line["samples"])
        for phase, spent_s in line["spent_s"].items():
            for rank, seconds in enumerate(spent_s):
                self._phases.labels(phase, rank).inc(max(seconds, 0.0))
        for rank, (memory, busy) in enumerate(zip(line["memory_bytes"], line["busy"], strict=True)):
            self._memory.labels(rank).set(memory)
            if busy >= 0:  # otherwise unknown
                self._busy.labels(rank).set(busy)

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def _address_of_job() -> str:
    """The IPv4 address of the first interface that Gloo uses, which `join` and `paceline run` set."""
    import psutil

    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo").split(",")[0]
    for each in psutil.net_if_addrs().get(interface, ()):
        if each.family == socket.AF_INET:
            return each.address
    return "127.0.0.1"
