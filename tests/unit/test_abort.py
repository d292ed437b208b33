"""Which connections end with the process groups."""

from __future__ import annotations

import os
import socket

import pytest

from paceline.job import failures


def test_connections_of_the_groups_end_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures.torch_private, "find", lambda _: lambda: None)  # as Gloo's abort
    num_open = len(os.listdir("/proc/self/fd"))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def connect() -> tuple[socket.socket, socket.socket]:
            return socket.create_connection(server.getsockname()), server.accept()[0]

        with failures.note_connections():
            groups = connect()
        others = connect()
        failures.abort_process_groups()
        assert [end.recv(1) for end in groups] == [b"", b""]
        others[0].sendall(b"x")
        assert others[1].recv(1) == b"x"
        for end in (*groups, *others):
            end.close()
    assert len(os.listdir("/proc/self/fd")) == num_open
