"""What passes between a parameter server and its clients: frames over a socket, and the server's file.

A frame is a length, a JSON header, and the bytes of the tensors that the header lists. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Snapshot = dict[str, Any]

POLL_S = 0.05  # pause before another attempt to accept or to connect
NOTICE_S = 0.25  # how often a client that waits for other workers is told that the server lives
_LENGTH = struct.Struct("!I")
# The kernel closes the connection of a host that is lost after about a minute. macOS names the first option
# TCP_KEEPALIVE.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
DTYPES = {
    str(t).removeprefix("torch."): t
    for t in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.int64, torch.int32, torch.bool),
    )
}


class Connection:
    """Frames over a socket: length, JSON header, and the bytes of the tensors that the header lists."""

    def __init__(self, plain: socket.socket) -> None:
        self.socket = plain
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            if hasattr(socket, option):
                plain.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, header: dict[str, Any], tensors: Sequence[Tensor] = ()) -> int:
        """Send one frame; return its bytes."""
        flat = [t.detach().cpu().contiguous() for t in tensors]
        shapes = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in flat]
        text = json.dumps(header | {"tensors": shapes}).encode()
        self.socket.sendall(_LENGTH.pack(len(text)) + text)
        size = _LENGTH.size + len(text)
        for each in flat:
            if each.numel():
                raw = each.reshape(-1).view(torch.uint8)
                self.socket.sendall(memoryview(raw.numpy()))  # type: ignore[arg-type]
                size += raw.numel()
        return size

    def receive(self) -> tuple[dict[str, Any], list[Tensor], int]:
        """Receive one frame: header, tensors and bytes. Raises OSError or ValueError."""
        header, size = self.receive_header()
        tensors = []
        for kind, shape in header["tensors"]:
            dtype = DTYPES[kind]
            nbytes = math.prod(shape) * dtype.itemsize
            flat = torch.empty(0, dtype=dtype)
            if nbytes:
                flat = torch.frombuffer(self._read(nbytes), dtype=dtype)
            tensors.append(flat.reshape(shape))
            size += nbytes
        return header, tensors, size

    def receive_header(
        self, limit: int = 1 << 32, within_s: float | None = None
    ) -> tuple[Any, int]:
        """Receive the header of a frame, of at most `limit` bytes, and no tensors: header and bytes.

        Raises OSError, ValueError or RecursionError; a TimeoutError after `within_s` seconds.
        """
        deadline = None if within_s is None else time.monotonic() + within_s
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        if length > limit:
            raise ValueError(f"a header of {length} bytes")
        return json.loads(self._read(length, deadline)), _LENGTH.size + length

    def _read(self, size: int, deadline: float | None = None) -> bytearray:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            if deadline is not None:
                self.socket.settimeout(max(0.001, deadline - time.monotonic()))
            count = self.socket.recv_into(view[done:])
            if count == 0:
                raise ConnectionResetError("closed by the peer")
            done += count
        return data

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that receives
        self.socket.close()


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file that only this user may read, whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    scratch = Path(name)
    try:
        write(scratch)
        os.fsync(handle)
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)
