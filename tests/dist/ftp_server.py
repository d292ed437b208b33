"""A server of files for tests: as much FTP as fsspec speaks, on a port of its own, without accounts."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class _Session(socketserver.StreamRequestHandler):
    server: Any

    def handle(self) -> None:
        # A client that has enough sends ABOR with its last byte urgent.
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
        self.listener: socket.socket | None = None
        self.at, self.old = 0, Path()
        self.say("220 ready")
        while line := self.rfile.readline():
            words = line.strip(b"\xff\xf4\xf2\r\n").decode().split(" ", 1)
            command, rest = words[0].upper(), words[-1]
            try:
                path = self.server.root / rest.lstrip("/")
                self.say(getattr(self, f"do_{command}", self.unknown)(rest, path))
            except FileNotFoundError:
                self.say("550 not found")
            except OSError as error:
                self.say(f"553 {error.strerror}")

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self.wfile.write(text.encode() + b"\r\n")

    def unknown(self, rest: str, path: Path) -> str:
        return "502 unknown"

    def fine(self, rest: str, path: Path) -> str:
        return "230 fine"

    do_USER = do_PASS = fine

    def do_TYPE(self, rest: str, path: Path) -> str:
        return "200 fine"

    def do_ABOR(self, rest: str, path: Path) -> str:
        return "226 aborted"

    def do_PASV(self, rest: str, path: Path) -> str:
        if self.listener is not None:
            self.listener.close()
        self.listener = socket.create_server(("127.0.0.1", 0))
        port = self.listener.getsockname()[1]
        return f"227 at (127,0,0,1,{port // 256},{port % 256})"

    def data(self) -> socket.socket:
        assert self.listener is not None
        self.say("150 here")
        data, _ = self.listener.accept()
        self.listener.close()
        self.listener = None
        return data

    def do_REST(self, rest: str, path: Path) -> str:
        self.at = int(rest)
        return "350 from there"

    def do_MLSD(self, rest: str, path: Path) -> str:
        entries = sorted(path.iterdir()) if path.is_dir() else [path][: path.exists()]
        with self.data() as data:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                    kind, size = "dir" if entry.is_dir() else "file", entry.stat().st_size
                    data.sendall(f"type={kind};size={size}; {entry.name}\r\n".encode())
        return "226 done" if entries or path.is_dir() else "550 not found"

    def do_RETR(self, rest: str, path: Path) -> str:
        at, self.at = self.at, 0
        content = path.read_bytes()[at:]
        with self.data() as data:
            try:
                data.sendall(content)
            except OSError:
                return "426 closed"
        return "226 done"

    def do_STOR(self, rest: str, path: Path) -> str:
        at, self.at = self.at, 0
        with path.open("r+b" if at else "wb") as file, self.data() as data:
            file.seek(at)
            while part := data.recv(1 << 16):
                file.write(part)
        return "226 done"

    def do_SIZE(self, rest: str, path: Path) -> str:
        return f"213 {path.stat().st_size}"

    def do_DELE(self, rest: str, path: Path) -> str:
        path.unlink()
        return "250 done"

    def do_MKD(self, rest: str, path: Path) -> str:
        path.mkdir()
        return f'257 "{rest}"'

    def do_RMD(self, rest: str, path: Path) -> str:
        shutil.rmtree(path)
        return "250 done"

    def do_RNFR(self, rest: str, path: Path) -> str:
        self.old = path
        return "350 to what"

    def do_RNTO(self, rest: str, path: Path) -> str:
        os.rename(self.old, path)
        return "250 done"


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    root: Path

    def handle_error(self, request: Any, client_address: Any) -> None:
        return  # clients come and go


@contextlib.contextmanager
def serve(root: Path) -> Iterator[str]:
    """Serve a folder; the URL."""
    with _Server(("127.0.0.1", 0), _Session) as server:
        server.root = root
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"ftp://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
