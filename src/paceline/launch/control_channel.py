"""A rank's end of the socket to its launcher: JSON lines in both directions, independent of collectives.

Loaded by worker.py, by file name, with the standard library only.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.watch.probe import Probe

_READ_BYTES = 1 << 16


class Control:
    """This rank's end of the socket to its launcher.

    Args:
        fd: The socket.
        probe: Answers the launcher's requests for the rank's state; None if it is switched off.
    """

    def __init__(self, fd: int, probe: Probe | None) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._file = os.fstat(fd).st_ino
        self._probe = probe
        self._lock = threading.Lock()
        # The script to run; None if the launcher ended before it sent one.
        self.scripts: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        # Handlers of the launcher's requests, by the value of "do"; called in the listening thread.
        self.handlers: dict[str, Callable[[dict[str, Any]], Any]] = {"run": self.scripts.put}
        if probe is not None:
            for word in probe.REQUESTS:
                self.handlers[word] = lambda request: probe.hear(request, self.send)
        # A forked child is not the rank: it must neither send events nor keep the socket open.
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._listen, name="paceline-control", daemon=True).start()

    def send(self, event: dict[str, Any]) -> bool:
        """Send an event to the launcher; False if that is not possible."""
        # The empty line ends anything that a script may have written here.
        line = b"\n" + json.dumps(event).encode() + b"\n"
        try:
            with self._lock:
                if self._is_ours():
                    self._socket.sendall(line)
                elif self._probe is None or event["event"] in self.handlers:
                    return False  # the probe's memory has room for events that end the rank, not for answers
                else:
                    self._probe.leave(line)
        except OSError:
            return False
        return True

    def _is_ours(self) -> bool:
        # If the script has closed all files, another one, such as a socket of Gloo, may have this number.
        try:
            return os.fstat(self._socket.fileno()).st_ino == self._file
        except OSError:
            return False

    def _listen(self) -> None:
        received = b""
        while self._is_ours():
            try:
                data = self._socket.recv(_READ_BYTES)
            except ConnectionError:
                data = b""
            except OSError:
                return  # closed by the script at this moment
            if not data:
                self.scripts.put(None)
                return  # the launcher has ended; its guard (guard.py) kills this rank and its children
            *lines, received = (received + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                handler = self.handlers.get(request.get("do"))
                if handler is not None:
                    handler(request)

    def _forget(self) -> None:
        if self._is_ours():
            os.close(self._socket.detach())
        self._probe = None
        os.environ.pop("PACELINE_CONTROL_FD", None)
