"""A server with a thread for each connection, and few connections: strangers cannot start threads at will."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from typing import Any

_MOST = 64  # connections that count, each with a thread


class FewConnectionsServer(socketserver.ThreadingTCPServer):
    """Keeps at most 64 connections that count: one more closes the oldest of them."""

    daemon_threads = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []  # oldest first
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread."""
        with self._lock:
            self._open.append(request)
            oldest = self._open.pop(0) if len(self._open) > _MOST else None
            if oldest is not None:
                with contextlib.suppress(OSError):  # the client has just left
                    oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.do_not_count(request)
        super().shutdown_request(request)

    def do_not_count(self, connection: socket.socket) -> None:
        """The connection has ended, or its client has shown the key."""
        with self._lock:
            if connection in self._open:
                self._open.remove(connection)
