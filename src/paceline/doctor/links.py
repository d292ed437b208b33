"""Links from each host to each other host, with plain sockets: reachability, latency, rate and clock offset.

Each host listens on the address that leads to the others, on a port that the kernel chooses and on one of the
range that firewalls usually open. A client must send the job's key. Uses no pickle.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

from paceline.doctor.facts import Facts
from paceline.job.connections import FewConnectionsServer
from paceline.job.environment import FIREWALL_PORTS
from paceline.job.network import addresses_of
from paceline.job.store_server import listen

_CONNECT_S = 3.0
_IO_S = 30.0
_PINGS = 20
_SIZES = {b"s": 1 << 20, b"l": 32 << 20}  # the large one only if the link is fast enough
_CHUNK = 1 << 20
_SLOW_S = 0.2
_POLL_S = 0.05  # within which a listener notices that it is closed
_PAUSE_S = 0.01  # after a failed accept
_KEY_CHARS = 64
_PING = b"p"


class Listener:
    """Answers the measurements of other hosts until it is closed.

    Attributes:
        endpoint: the address, and the two ports: "ephemeral" and "fixed"; None if it could not listen there.
    """

    def __init__(self, address: str, key: str) -> None:
        low, high = FIREWALL_PORTS
        free = next((s for p in range(low, high + 1) if (s := _listen(address, p))), None)
        chosen = _listen(address, 0)
        self.endpoint: Facts = {
            "address": address,
            "ephemeral": chosen.getsockname()[1] if chosen else None,
            "fixed": free.getsockname()[1] if free else None,
        }
        self._servers = [_Server(s, key) for s in (chosen, free) if s is not None]
        self._threads = [
            threading.Thread(target=s.serve_forever, args=(_POLL_S,)) for s in self._servers
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop listening. Clients that are being answered are not waited for."""
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()


class _Answers(socketserver.BaseRequestHandler):
    """The answers to one client; it must send the key first."""

    server: _Server

    def handle(self) -> None:
        peer: socket.socket = self.request
        with contextlib.suppress(OSError):  # the client reports what failed
            key = _receive(peer, _KEY_CHARS, time.monotonic() + _CONNECT_S)
            self.server.do_not_count(peer)
            if not hmac.compare_digest(key, self.server.key):
                return
            peer.settimeout(_IO_S)
            while request := peer.recv(1):
                for _ in range(_SIZES.get(request, 0) // _CHUNK):
                    _receive(peer, _CHUNK)
                peer.sendall(struct.pack("d", time.time()))


class _Server(FewConnectionsServer):
    """Serves on a socket that listens already. Clients that have not sent the key count."""

    def __init__(self, listening: socket.socket, key: str) -> None:
        super().__init__(listening.getsockname(), _Answers, bind_and_activate=False)
        self.socket.close()
        self.socket, self.key = listening, key.encode()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a client."""
        try:
            return super().get_request()
        except (
            OSError
        ):  # it has left, or too many files are open, and the next attempt follows at once
            time.sleep(_PAUSE_S)
            raise


def measure(endpoint: Facts, key: str, host: str) -> Facts:
    """Measure the link from here to another host's `endpoint`, and resolve its name here."""
    link: Facts = {"resolved": addresses_of(host)}
    for kind in ("fixed", "ephemeral"):
        if endpoint[kind] is None:
            link[kind] = "the peer could not listen there"
            continue
        try:
            with socket.create_connection(
                (endpoint["address"], endpoint[kind]), _CONNECT_S
            ) as connection:
                link["from_address"] = connection.getsockname()[0]
                link[kind] = ""
                connection.settimeout(_IO_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(key.encode())
                if kind == "ephemeral":
                    link |= _speed(connection)
        except OSError as error:
            link[kind] = str(error) or type(error).__name__
    return link


def rounds(size: int, me: int) -> Iterator[int]:
    """The host that host `me` measures in each round; no two hosts measure the same one at once."""
    return ((me + step) % size for step in range(1, size))


def _speed(connection: socket.socket) -> Facts:
    pings = []
    for _ in range(_PINGS):
        sent, received, their_clock = _ask(connection, _PING)
        # Assume that the peer read its clock in the middle.
        pings.append((received - sent, their_clock - (sent + received) / 2))
    rate = 0.0
    for request, size in _SIZES.items():
        began = time.perf_counter()
        connection.sendall(request + bytes(size))
        _receive(connection, 8)
        took = time.perf_counter() - began
        rate = size / took
        if took > _SLOW_S:
            break
    pings.sort()
    return {
        "latency_s": pings[len(pings) // 2][0] / 2,
        "clock_s": pings[0][1],
        "bytes_per_s": rate,
    }


def _ask(connection: socket.socket, request: bytes) -> tuple[float, float, float]:
    sent = time.time()
    connection.sendall(request)
    their_clock: float = struct.unpack("d", _receive(connection, 8))[0]
    return sent, time.time(), their_clock


def _listen(address: str, port: int) -> socket.socket | None:
    if not address:
        return None  # the empty address would be all interfaces
    try:
        return listen(address, port)
    except OSError:
        return None


def _receive(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        count = connection.recv_into(view)
        if count == 0:
            raise ConnectionError("the peer closed the connection")
        view = view[count:]
    return bytes(data)
