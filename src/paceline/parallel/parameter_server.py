"""Parameter server: tables and their optimizers in server processes; workers come, fail and leave freely.

A worker pulls the rows that a batch uses, and pushes their gradients. The server applies each push at once
with a `torch.optim` optimizer. Workers are not ranks of one job, so a worker that fails ends no other.

`torch.distributed.rpc` is not used. After a member of its dynamic group is killed, no process can join or
leave the group (`test_torch_rpc_admits_nobody_after_a_member_was_killed`), and RPC unpickles what a peer
sends. Messages here are JSON and the bytes of tensors; a client must know the server's key.

Source of the staleness bound: Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server, NeurIPS 2013.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import os
import secrets
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline import log
from paceline.errors import (
    CheckpointError,
    CollectiveTimeout,
    ConfigError,
    GradientError,
    NonFinite,
    PacelineError,
    PeerFailed,
    StepError,
)

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Snapshot = dict[str, Any]

_HELLO_BYTES = 4096  # largest header before the client has shown the key
_HELLO_S = 10.0  # how long the server waits for that header
_NOTICE_S = 1.0  # how often a client that waits for other workers is told so
_POLL_S = 0.05  # how often a client looks for the server's file
_LENGTH = struct.Struct("!I")
_ANY_ADDRESS = ("", "0.0.0.0", "::", "*")
_DTYPES = {
    str(t).removeprefix("torch."): t
    for t in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.int64, torch.int32, torch.bool),
    )
}
_ERRORS: dict[str, type[PacelineError]] = {
    e.__name__: e for e in (ConfigError, NonFinite, PeerFailed, StepError)
}


class _Connection:
    """Frames over a socket: length, JSON header, and the bytes of the tensors that the header lists."""

    def __init__(self, plain: socket.socket) -> None:
        self.socket = plain
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

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
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        header = json.loads(self._read(length))
        tensors, size = [], _LENGTH.size + length
        for kind, shape in header["tensors"]:
            dtype = _DTYPES[kind]
            nbytes = math.prod(shape) * dtype.itemsize
            flat = torch.empty(0, dtype=dtype)
            if nbytes:
                flat = torch.frombuffer(self._read(nbytes), dtype=dtype)
            tensors.append(flat.reshape(shape))
            size += nbytes
        return header, tensors, size

    def receive_hello(self) -> Any:
        """The header of the first frame, before the client has shown the key: short, and its tensors unread.

        Raises OSError, ValueError or RecursionError.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > _HELLO_BYTES:
            raise ValueError(f"a header of {length} bytes")
        return json.loads(self._read(length))

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            count = self.socket.recv_into(view[done:])
            if count == 0:
                raise ConnectionResetError("closed by the peer")
            done += count
        return data

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that receives
        self.socket.close()


class _Parameter:
    """A parameter, or this server's rows of a table, with its optimizer and its lock."""

    def __init__(
        self, name: str, value: Tensor, make: MakeOptimizer, shard: tuple[int, int]
    ) -> None:
        self.index, self.count = shard
        self.is_table = self.count > 0
        self.shape = list(value.shape)
        rows = value[self.index :: self.count] if self.is_table else value
        if self.is_table:
            _refuse_optimizer(name, make, value)
        self.value = nn.Parameter(rows.detach().cpu().clone().contiguous())
        self.optimizer = make([self.value])
        self.lock = threading.Lock()

    def local(self, ids: Tensor) -> Tensor:
        """The places of these rows of the table on this server. Raises ConfigError."""
        wrong = ids.dtype != torch.int64 or ids.dim() != 1
        if wrong or (ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.shape[0]):
            raise ConfigError("row ids must be 1-D int64 and in the table.")
        if bool((ids % self.count != self.index).any()):
            raise ConfigError(
                "these rows are on another server.", fix="give all files, in shard order."
            )
        return ids // self.count

    def check(self, ids: Tensor | None, gradient: Tensor) -> tuple[Tensor | None, Tensor]:
        """The arguments of `apply` for a pushed gradient. Raises ConfigError or NonFinite."""
        local = None if ids is None else self.local(ids)
        first = self.value.shape[:1] if local is None else local.shape
        expected = (*first, *self.value.shape[1:]) if self.value.dim() else ()
        if tuple(gradient.shape) != expected or gradient.dtype != self.value.dtype:
            raise ConfigError(
                f"a gradient of shape {tuple(gradient.shape)} and {gradient.dtype} does not fit "
                f"{expected} and {self.value.dtype}."
            )
        if not bool(gradient.isfinite().all()):
            raise NonFinite("a pushed gradient has NaN or infinity.", quantity="gradient")
        return local, gradient

    def apply(self, ids: Tensor | None, gradient: Tensor) -> None:
        with self.lock:
            if ids is not None:
                gradient = torch.sparse_coo_tensor(
                    ids[None], gradient, self.value.shape, check_invariants=False
                )
            self.value.grad = gradient
            self.optimizer.step()
            self.value.grad = None

    def read(self, ids: Tensor | None) -> Tensor:
        with self.lock:
            value = self.value.detach()
            return value.clone() if ids is None else value[self.local(ids)]

    def state(self) -> dict[str, Any]:
        found = self.optimizer.state.get(self.value, {})
        return {
            k: v.clone() if isinstance(v, Tensor) else v for k, v in found.items() if v is not None
        }

    def load(self, value: Tensor, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            self.value.copy_(self._mine(value))
        for key, entry in state.items():
            mine = self._mine(entry) if isinstance(entry, Tensor) else entry
            self.optimizer.state[self.value][key] = mine

    def _mine(self, value: Tensor) -> Tensor:
        by_row = self.is_table and value.dim() > 0 and value.shape[0] == self.shape[0]
        return (value[self.index :: self.count] if by_row else value).clone()


class ParameterServer:
    """Holds embedding tables and dense parameters, and applies the gradients that workers push.

    Use it as a context manager: it listens inside of the `with` block. Row `i` of a table is on shard
    `i % shards`; dense parameters are on shard 0. Each push is one optimizer step for what it contains. The
    server computes on CPU.

    Anyone who can read `file` can read and change the parameters; nobody can run code through the server.
    The traffic is not encrypted.

    Args:
        tables: Each whole table by name, of shape (rows, ...). A server keeps a copy of its rows.
        optimizer: Makes the optimizer of one parameter, as `lambda p: torch.optim.Adagrad(p, lr=0.1)`; or
            one such function for each name. Those of tables must take sparse gradients: SGD without
            momentum, Adagrad, SparseAdam.
        file: Where the server writes its address and key, for `connect_server`. Only this user may read it.
        dense: Parameters by name that workers pull and push as a whole.
        shard: This server's index, and the number of servers.
        listen: Host or address of the interface to listen on, and a port; port 0 lets the kernel choose.
        max_staleness: A worker that has pushed this many steps more than the slowest one waits before it
            pulls again. 0 keeps the workers in step. The value of shard 0 counts.
        worker_timeout_s: A worker that others wait for is dropped if it makes no request for so long after
            its last one was answered.

    Attributes:
        address: "host:port" while it listens.
        version: Number of pushes that have been applied.

    Raises:
        ConfigError: a table without rows, a name that is used twice, an optimizer that does not take sparse
            gradients, all interfaces in `listen`, an address that cannot be bound, or a file that cannot be
            written.

    Collective: none. One process for each shard.
    """

    def __init__(
        self,
        tables: Mapping[str, Tensor],
        optimizer: MakeOptimizer | Mapping[str, MakeOptimizer],
        file: str | Path,
        *,
        dense: Mapping[str, Tensor] | None = None,
        shard: tuple[int, int] = (0, 1),
        listen: str = "127.0.0.1:0",
        max_staleness: int = 4,
        worker_timeout_s: float = 60.0,
    ) -> None:
        dense = dense or {}
        self._index, self._count = shard
        if not 0 <= self._index < self._count:
            raise ConfigError(f"shard={shard} is not an index and a number of servers.")
        if max_staleness < 0 or worker_timeout_s <= 0:
            raise ConfigError("max_staleness must be at least 0, and worker_timeout_s more than 0.")
        twice = sorted(tables.keys() & dense.keys())
        if twice or not (tables or dense):
            raise ConfigError(
                f"{twice[0]!r} is a table and a dense parameter." if twice else "no parameters."
            )
        if not torch.sparse.check_sparse_tensor_invariants.is_enabled():  # type: ignore[no-untyped-call]
            # torch's default, chosen explicitly: else torch warns when its optimizers build sparse tensors.
            torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
        self._held: dict[str, _Parameter] = {}
        for name, value in [*tables.items(), *dense.items()]:
            make = optimizer.get(name) if isinstance(optimizer, Mapping) else optimizer
            if make is None:
                raise ConfigError(f"optimizer= has no entry for {name!r}.")
            if name in tables and (value.dim() < 2 or value.shape[0] == 0):
                raise ConfigError(f"table {name!r} must be (rows, ...), got {tuple(value.shape)}.")
            if not value.is_floating_point():
                raise ConfigError(f"{name!r} must have a floating-point dtype, got {value.dtype}.")
            if name in tables or self._index == 0:
                self._held[name] = _Parameter(
                    name, value, make, shard if name in tables else (0, 0)
                )
        self._host, _, port = listen.rpartition(":")
        is_port = port.isdecimal() and int(port) < 1 << 16
        if self._host.strip("[]") in _ANY_ADDRESS or not is_port:
            raise ConfigError(
                f"listen={listen!r} is not one interface and a port.",
                why="a server listens on the interface of its job only.",
                fix='give the address of that interface, as in "10.0.0.5:29510".',
            )
        self._port, self._file = int(port), Path(file)
        self._max_staleness, self._worker_timeout_s = max_staleness, worker_timeout_s
        self._key = secrets.token_hex(32)
        self.address = ""
        self.version = 0
        self._changed = threading.Condition()  # guards everything below, and `version`
        self._connections: dict[int, _Connection] = {}
        self._threads: list[threading.Thread] = []
        self._num_connected = 0  # workers so far; also the number of the newest
        self._steps: dict[int, int] = {}  # pushes of each worker that trains
        self._idle_since: dict[int, float] = {}  # when the last request of a worker was answered
        self._pushing: set[int] = set()
        self._copies: dict[int, tuple[dict[str, Any], list[Tensor]]] = {}  # not fetched yet
        self._holder: int | None = None  # who takes a snapshot; pushes wait
        self._failure: BaseException | None = None
        self._listener: socket.socket | None = None

    def load(self, snapshot: Snapshot) -> None:
        """Continue from `ServerClient.snapshot(optimizer=True)`, of any number of servers.

        Call it before the server listens.

        Raises:
            CheckpointError: names or shapes differ from those of this server.
        """
        values = snapshot["parameters"]
        unknown = sorted(values.keys() - self._held.keys())
        if unknown and self._index == 0:  # only this server knows the dense parameters too
            raise CheckpointError(
                f"the snapshot has {unknown[0]!r}, which this server does not have."
            )
        for name, held in self._held.items():
            if name not in values or list(values[name].shape) != held.shape:
                found = tuple(values[name].shape) if name in values else "nothing"
                raise CheckpointError(
                    f"the snapshot has {found} for {name!r}, not {tuple(held.shape)}."
                )
        for name, held in self._held.items():
            held.load(values[name], snapshot.get("optimizer", {}).get(name, {}))
        self.version = int(snapshot["version"])

    def __enter__(self) -> ParameterServer:
        try:
            info = socket.getaddrinfo(self._host.strip("[]"), self._port, type=socket.SOCK_STREAM)[
                0
            ]
            self._listener = socket.create_server(info[4][:2], family=info[0], backlog=128)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self._host}:{self._port}: {error.strerror}.",
                fix="give an address of this host, and a free port or 0.",
            ) from error
        host, port = self._listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if not (host.startswith("127.") or host == "::1"):
            log.logger.warning(
                "the parameter server listens on %s: who can read %s can read and change the parameters "
                "from other hosts, and the traffic is not encrypted; use a trusted network.",
                self.address,
                self._file,
            )
        text = json.dumps({"host": host, "port": port, "key": self._key})
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            _replace(self._file, lambda path: path.write_text(text))
        except OSError as error:
            self._listener.close()
            raise ConfigError(
                f"{self._file} cannot be written: {error.strerror}.",
                fix="give a path in a folder that this user may write to.",
            ) from error
        self._start(self._accept, self._listener)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, remove the file, and close all connections. Workers get PeerFailed."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        self._file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        listener.close()
        while True:
            with self._changed:
                threads, self._threads = self._threads, []
                for connection in self._connections.values():
                    connection.close()
                self._changed.notify_all()
            if not threads:
                return
            for thread in threads:
                thread.join()

    def wait(self, workers: int = 1) -> None:
        """Wait until `workers` workers have connected and none is connected any more.

        A worker that was killed counts as one that has left. Leave the `with` block to stop earlier.

        Raises:
            Exception: the error of an optimizer, or another that made this server fail.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._failure is not None
                    or (self._num_connected >= workers and not self._connections)
                )
            )
            if self._failure is not None:
                raise self._failure

    def _start(self, work: Callable[[Any], None], argument: Any) -> None:
        thread = threading.Thread(
            target=work, args=(argument,), daemon=True, name="paceline-server"
        )
        with self._changed:
            self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
            thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                plain = listener.accept()[0]
            except OSError:
                if self._listener is None:
                    return
                time.sleep(_POLL_S)  # too many files are open, or the client has gone
                continue
            self._start(self._serve, _Connection(plain))

    def _serve(self, connection: _Connection) -> None:
        worker = None
        try:
            if not self._has_key(connection):
                return
            with self._changed:
                if self._listener is None:
                    return
                self._num_connected += 1
                worker = self._num_connected
                self._connections[worker] = connection
            parameters = {
                name: [h.is_table, h.shape, str(h.value.dtype).removeprefix("torch.")]
                for name, h in self._held.items()
            }
            connection.send({"shard": [self._index, self._count], "parameters": parameters})
            self._answer_all(worker, connection)
        except OSError as error:
            log.logger.debug("worker %s has left: %s", worker, error)
        except BaseException as error:
            with self._changed:
                self._failure = error
            with contextlib.suppress(OSError):
                connection.send({"error": "PeerFailed", "what": f"the server failed: {error}"})
        finally:
            connection.close()
            if worker is not None:
                self._forget(worker)

    def _has_key(self, connection: _Connection) -> bool:
        connection.socket.settimeout(_HELLO_S)
        try:
            key = connection.receive_hello().get("key")
            given = str(key).encode()
        except (
            ValueError,
            AttributeError,
            RecursionError,
        ) as error:  # what JSON from anyone can cause
            log.logger.debug("a connection without the key: %s", error)
            return False
        connection.socket.settimeout(None)
        return hmac.compare_digest(given, self._key.encode())

    def _answer_all(self, worker: int, connection: _Connection) -> None:
        while True:
            header, tensors, _ = connection.receive()
            with self._changed:
                self._idle_since.pop(worker, None)
            try:
                reply, values = self._answer(worker, connection, header, tensors)
            except PacelineError as error:
                reply, values = {"error": type(error).__name__, "what": error.what}, []
            with self._changed:  # before the reply: a stopped worker may never read it
                self._idle_since[worker] = time.monotonic()
            connection.send(reply, values)

    def _forget(self, worker: int) -> None:
        with self._changed:
            self._connections.pop(worker, None)
            self._steps.pop(worker, None)
            self._idle_since.pop(worker, None)
            self._copies.pop(worker, None)
            self._pushing.discard(worker)
            if self._holder == worker:
                self._holder = None
            self._changed.notify_all()

    def _answer(
        self, worker: int, connection: _Connection, header: dict[str, Any], tensors: list[Tensor]
    ) -> tuple[dict[str, Any], list[Tensor]]:
        task = header["do"]
        if task == "pull":
            if header["trains"]:
                with self._changed:
                    self._steps.setdefault(worker, min(self._steps.values(), default=0))
                self._wait(connection, lambda: self._may_pull(worker), self._slowest)
            given = iter(tensors)
            wanted = [self._find(name) for name in header["names"]]
            return {}, [held.read(next(given) if held.is_table else None) for held in wanted]
        if task == "push":
            return self._push(worker, connection, header, tensors)
        if task == "end":
            return self._end_push(worker), []
        if task == "hold":
            self._hold(worker, connection)
            return {}, []
        if task == "copy":
            copy = self._copy(header["optimizer"])
            with self._changed:
                self._copies[worker] = copy
            return {}, []
        if task == "release":
            with self._changed:
                self._holder = None
                self._changed.notify_all()
            return {}, []
        if task == "fetch":
            with self._changed:
                return self._copies.pop(worker)
        raise ConfigError(f"unknown request {task!r}.")

    def _find(self, name: str) -> _Parameter:
        if name not in self._held:
            raise ConfigError(f"this server has no parameter {name!r}.")
        return self._held[name]

    def _wait(
        self,
        connection: _Connection,
        ready: Callable[[], bool],
        blockers: Callable[[], Iterable[int]],
        then: Callable[[], object] = lambda: None,
    ) -> None:
        """Wait until `ready`, or the server closes, and call `then` under the lock.

        Each second: drop the workers of `blockers` that have made no request for `worker_timeout_s`.
        """
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: ready() or self._listener is None, _NOTICE_S):
                    then()
                    return
                limit = time.monotonic() - self._worker_timeout_s
                for other in blockers():
                    if self._idle_since.get(other, math.inf) < limit:
                        log.logger.warning(
                            "worker %d was dropped: others wait for it, and it made no request for %g s.",
                            other,
                            self._worker_timeout_s,
                        )
                        self._connections[other].close()
            # Shows this worker that the server lives, and ends this wait if the worker has gone.
            connection.send({"waiting": True})

    def _slowest(self) -> list[int]:
        least = min(self._steps.values())
        return [worker for worker, steps in self._steps.items() if steps == least]

    def _hold(self, worker: int, connection: _Connection) -> None:
        def take() -> None:
            self._holder = worker

        self._wait(connection, self._is_released, self._holders, take)
        self._wait(connection, lambda: not self._pushing, lambda: self._pushing)

    def _is_released(self) -> bool:
        return self._holder is None

    def _holders(self) -> list[int]:
        return [] if self._holder is None else [self._holder]

    def _may_pull(self, worker: int) -> bool:
        return self._steps[worker] - min(self._steps.values()) <= self._max_staleness

    def _push(
        self,
        worker: int,
        connection: _Connection,
        header: dict[str, Any],
        tensors: list[Tensor],
    ) -> tuple[dict[str, Any], list[Tensor]]:
        given, work = iter(tensors), []
        for name in header["names"]:
            held = self._find(name)
            ids = next(given) if held.is_table else None
            work.append((held, held.check(ids, next(given))))
        if header["begins"]:
            self._wait(
                connection, self._is_released, self._holders, lambda: self._pushing.add(worker)
            )
        for held, (rows, gradient) in work:
            held.apply(rows, gradient)
        return (self._end_push(worker) if header["ends"] else {}), []

    def _end_push(self, worker: int) -> dict[str, Any]:
        with self._changed:
            self._pushing.discard(worker)
            self._steps[worker] = self._steps.get(worker, 0) + 1
            self.version += 1
            lead = self._steps[worker] - min(self._steps.values())
            self._changed.notify_all()
            return {"version": self.version, "lead": lead}

    def _copy(self, optimizer: bool) -> tuple[dict[str, Any], list[Tensor]]:
        """All values; nothing is applied meanwhile, because shard 0 holds back pushes."""
        tensors, entries = [], []
        for name, held in self._held.items():
            for key, value in {"": held.read(None), **(held.state() if optimizer else {})}.items():
                if isinstance(value, Tensor):
                    entries.append([name, key, None])
                    tensors.append(value)
                else:
                    entries.append([name, key, value])
        return {"version": self.version, "entries": entries}, tensors


class ServerClient:
    """A connection to all shards of a parameter server; `connect_server` makes it.

    Use it in one thread, and as a context manager: leaving the block tells the servers that this worker has
    left.

    Attributes:
        bytes_pulled: bytes of the messages that brought values.
        bytes_pushed: bytes of the messages that took gradients.
        version: the number of pushes that the server had applied after the last push of this worker.
        lead: how many steps this worker was ahead of the slowest one after its last push.

    Raises:
        PeerFailed: of each method: a server has ended, or has dropped this worker.
        CollectiveTimeout: of each method: a server did not answer within `timeout_s`.

    Collective: none.
    """

    def __init__(
        self,
        connections: list[_Connection],
        parameters: dict[str, tuple[bool, list[int], torch.dtype]],
        *,
        clip_norm: float | None,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        self._connections = connections
        self._parameters = parameters
        self._clip_norm = clip_norm
        self._timeout_s = timeout_s
        self._device = device
        self._pulled: list[tuple[str, Tensor | None, Tensor]] = []
        self.bytes_pulled = 0
        self.bytes_pushed = 0
        self.version = 0
        self.lead = 0

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave. Other workers no longer wait for this one."""
        for connection in self._connections:
            connection.close()

    def pull(self, table: str, ids: Tensor) -> Tensor:
        """The rows `ids` of a table: int64 of any shape to values of shape (*ids.shape, *row shape).

        Each different row is sent once. Under `torch.no_grad()` the rows are values only: they are not
        pushed, and the call does not wait for slower workers. Otherwise it waits while this worker is more
        than `max_staleness` steps ahead.

        Raises:
            ConfigError: an unknown table, or ids that are not int64 or not in the table.
        """
        rows = self._rows_of(table)
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
            found = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise ConfigError(f"ids of table {table!r} must be an int64 tensor, got {found}.")
        unique, where = torch.unique(ids.detach(), return_inverse=True)
        unique = unique.cpu()
        if unique.numel() and (int(unique[0]) < 0 or int(unique[-1]) >= rows):
            wrong = unique[0] if int(unique[0]) < 0 else unique[-1]
            raise ConfigError(
                f"row {int(wrong)} is not in table {table!r} of {rows} rows.",
                fix="check the ids of the batch; ids begin at 0.",
            )
        _, shape, dtype = self._parameters[table]
        count = len(self._connections)
        values = torch.empty((len(unique), *shape[1:]), dtype=dtype)
        masks = [unique % count == i for i in range(count)]
        parts = self._pull([table], {i: [unique[mask]] for i, mask in enumerate(masks)})
        for mask, (part,) in zip(masks, parts, strict=True):
            values[mask] = part
        leaf = self._keep(table, unique, values)
        return functional.embedding(where.to(leaf.device), leaf.flatten(1)).reshape(
            *ids.shape, *shape[1:]
        )

    def pull_dense(self) -> dict[str, Tensor]:
        """All dense parameters by name, for `torch.func.functional_call`. It waits as `pull` does."""
        names = [name for name, (is_table, _, _) in self._parameters.items() if not is_table]
        (values,) = self._pull(names, {0: []})
        return {n: self._keep(n, None, value) for n, value in zip(names, values, strict=True)}

    def push(self) -> int:
        """Send the gradients of all that was pulled since the last push; return `version`.

        The gradients are clipped together to the norm `clip_norm` first. Call `backward` before; it may be
        called several times. What was pulled and got no gradient is not sent.

        Raises:
            GradientError: nothing that was pulled has a gradient.
            NonFinite: a gradient has NaN or infinity. Nothing was sent.
        """
        pulled, self._pulled = self._pulled, []
        used = [each for each in pulled if each[2].grad is not None]
        if not used:
            raise GradientError(
                "nothing to push: no pulled value has a gradient.",
                fix="call client.pull, compute the loss from its result, and call backward before push.",
                parameters=[name for name, _, _ in pulled],
            )
        by_name: dict[str, list[tuple[Tensor | None, Tensor]]] = {}
        for name, ids, leaf in used:
            assert leaf.grad is not None
            by_name.setdefault(name, []).append((ids, leaf.grad.cpu()))
        summed = {name: _summed(parts) for name, parts in by_name.items()}
        self._clip({name: gradient for name, (_, gradient) in summed.items()})
        count = len(self._connections)
        with self._closed_on_error():
            for shard in range(count):
                names, tensors = _part_of(summed, shard, count)
                header = {"do": "push", "names": names, "begins": shard == 0, "ends": count == 1}
                self._send(shard, header, tensors, counts=True)
                if shard == 0:  # it lets no snapshot begin until the push ends
                    reply = self._receive(0)[0]
            for shard in range(1, count):
                self._receive(shard)
            if count > 1:
                reply = self._ask(0, {"do": "end"})[0]
        self.version, self.lead = reply["version"], reply["lead"]
        return self.version

    def snapshot(self, *, optimizer: bool = False) -> Snapshot:
        """All parameters at one version: no push is applied while the servers copy them.

        Args:
            optimizer: With the optimizers' state, as `ParameterServer.load` needs it.

        Returns:
            {"version": int, "parameters": {name: tensor}, "optimizer": {name: {key: tensor or number}}}, on
            CPU, with whole tables, whatever the number of servers.
        """
        shards = range(len(self._connections))
        with self._closed_on_error():
            self._ask(0, {"do": "hold"})
            for shard in shards:
                self._send(shard, {"do": "copy", "optimizer": optimizer})
            for shard in shards:
                self._receive(shard)
            self._ask(0, {"do": "release"})
            replies = [self._ask(shard, {"do": "fetch"}) for shard in shards]
        merged: Snapshot = {"version": replies[0][0]["version"], "parameters": {}}
        merged["optimizer"] = {}
        for shard, (header, tensors, _) in enumerate(replies):
            given = iter(tensors)
            for name, key, number in header["entries"]:
                value = next(given) if number is None else number
                into = merged["optimizer"].setdefault(name, {}) if key else merged["parameters"]
                self._merge(into, key or name, name, value, shard)
        return merged

    def save(self, path: str | Path) -> int:
        """Write `snapshot(optimizer=True)` to a file atomically, with torch.save; return its version.

        Raises:
            CheckpointError: the file cannot be written; an existing one is unchanged.
        """
        content = self.snapshot(optimizer=True)
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            _replace(Path(path), lambda scratch: torch.save(content, scratch))
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            raise CheckpointError(f"{path} cannot be written: {error}", path=str(path)) from error
        return int(content["version"])

    def _merge(self, into: dict[str, Any], key: str, name: str, value: Any, shard: int) -> None:
        is_table, shape, _ = self._parameters[name]
        count = len(self._connections)
        rows = len(range(shard, shape[0], count)) if is_table else 0
        if is_table and isinstance(value, Tensor) and value.dim() and value.shape[0] == rows:
            whole = into.setdefault(key, value.new_empty((shape[0], *value.shape[1:])))
            whole[shard::count] = value
        else:
            into.setdefault(key, value)

    def _rows_of(self, table: str) -> int:
        is_table, shape, _ = self._parameters.get(table, (False, [0], torch.float32))
        if not is_table:
            known = [name for name, (tabular, _, _) in self._parameters.items() if tabular]
            near = get_close_matches(table, known, 1)
            raise ConfigError(
                f"the server has no table {table!r}.",
                fix=f"did you mean {near[0]!r}?" if near else f"its tables: {', '.join(known)}.",
            )
        return shape[0]

    def _keep(self, name: str, ids: Tensor | None, values: Tensor) -> Tensor:
        leaf = values.to(self._device)
        if torch.is_grad_enabled():
            leaf = leaf.detach().requires_grad_()
            self._pulled.append((name, ids, leaf))
        return leaf

    def _pull(self, names: list[str], ids: dict[int, list[Tensor]]) -> list[list[Tensor]]:
        header = {"do": "pull", "names": names, "trains": False}
        others = [shard for shard in ids if shard]
        with self._closed_on_error():
            # Shard 0 knows all workers' steps, so its answer comes before the others are asked.
            replies = [self._ask(0, header | {"trains": torch.is_grad_enabled()}, ids[0])]
            for shard in others:
                self._send(shard, header, ids[shard])
            replies += [self._receive(shard) for shard in others]
        self.bytes_pulled += sum(size for _, _, size in replies)
        return [tensors for _, tensors, _ in replies]

    def _clip(self, gradients: Mapping[str, Tensor]) -> None:
        norm = nn.utils.get_total_norm(list(gradients.values()))
        if not bool(norm.isfinite()):
            wrong = [name for name, g in gradients.items() if not bool(g.isfinite().all())]
            raise NonFinite(
                f"gradients of {', '.join(wrong or gradients)} have NaN or infinity.",
                fix="nothing was pushed; skip the batch, or lower the learning rate.",
                quantity="gradient",
                parameters=wrong or list(gradients),
            )
        if self._clip_norm is not None:
            factor = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_
            for gradient in gradients.values():
                gradient.mul_(factor)

    def _ask(
        self, shard: int, header: dict[str, Any], tensors: Sequence[Tensor] = ()
    ) -> tuple[dict[str, Any], list[Tensor], int]:
        self._send(shard, header, tensors)
        return self._receive(shard)

    def _send(
        self,
        shard: int,
        header: dict[str, Any],
        tensors: Sequence[Tensor] = (),
        counts: bool = False,
    ) -> None:
        with self._explained(shard):
            size = self._connections[shard].send(header, tensors)
            self.bytes_pushed += size if counts else 0

    def _receive(self, shard: int) -> tuple[dict[str, Any], list[Tensor], int]:
        while True:
            with self._explained(shard):
                reply = self._connections[shard].receive()
            if "error" in reply[0]:
                raise _ERRORS.get(reply[0]["error"], PacelineError)(
                    reply[0]["what"], where=f"server {shard} of {len(self._connections)}"
                )
            if "waiting" not in reply[0]:
                return reply

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """Leave if a request to several servers breaks off.

        An unread reply would be taken for the next one, and server 0 may hold back the requests of others
        until this one ends.
        """
        try:
            yield
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def _explained(self, shard: int) -> Iterator[None]:
        where = f"server {shard} of {len(self._connections)}"
        try:
            yield
        except TimeoutError as error:
            self.close()  # a late answer would be taken for the next one
            raise CollectiveTimeout(
                f"the parameter server did not answer within {self._timeout_s:g} s.",
                where=where,
                why="it is stopped or overloaded, or the network is interrupted.",
                fix="see its log; connect again with connect_server, or raise timeout_s.",
                missing=[shard],
                waited_s=self._timeout_s,
            ) from error
        except OSError as error:
            self.close()
            raise PeerFailed(
                "the connection to the parameter server is closed.",
                where=where,
                why="the server ended, or dropped this worker because others waited for it and it made no "
                "request for worker_timeout_s.",
                fix="see the log of the server; connect again with connect_server.",
                rank=shard,
            ) from error


def connect_server(
    *files: str | Path,
    clip_norm: float | None = None,
    timeout_s: float = 60.0,
    device: str | torch.device = "cpu",
) -> ServerClient:
    """Connect to a parameter server as a worker. It waits until the server listens.

    Args:
        files: The `file` of each shard, in order of the shards.
        clip_norm: Clip the gradients of each push to this norm, over all tables together.
        timeout_s: How long to wait for the server, here and in each request. Waiting for slower workers
            does not count.
        device: Where pulled values are.

    Raises:
        ConfigError: no file, a file of something else, files of different servers or in the wrong order, or a
            wrong `clip_norm`.
        CollectiveTimeout: no server listened in time.

    Collective: none. A worker may connect at any time.
    """
    if not files:
        raise ConfigError("connect_server needs the file of each server.")
    if clip_norm is not None and not clip_norm > 0:
        raise ConfigError(f"clip_norm must be more than 0, got {clip_norm}.")
    connections: list[_Connection] = []
    parameters: dict[str, tuple[bool, list[int], torch.dtype]] = {}
    deadline = time.monotonic() + timeout_s
    try:
        for index, file in enumerate(files):
            connection, hello = _connect(Path(file), deadline, timeout_s)
            connections.append(connection)
            if hello["shard"] != [index, len(files)]:
                at, count = hello["shard"]
                raise ConfigError(
                    f"{file} is of server {at} of {count}, and was given as {index} of {len(files)}.",
                    fix="give the files of all servers, in the order of their shards.",
                )
            for name, (is_table, shape, dtype) in hello["parameters"].items():
                parameters.setdefault(name, (is_table, shape, _DTYPES[dtype]))
    except BaseException:
        for connection in connections:
            connection.close()
        raise
    return ServerClient(
        connections,
        parameters,
        clip_norm=clip_norm,
        timeout_s=timeout_s,
        device=torch.device(device),
    )


def _connect(file: Path, deadline: float, timeout_s: float) -> tuple[_Connection, dict[str, Any]]:
    reason: Exception = FileNotFoundError(f"{file} does not exist")
    while (left := deadline - time.monotonic()) > 0:
        plain = None
        try:
            host, port, key = _read_address(file)
            plain = socket.create_connection((host, port), left)
            connection = _Connection(plain)
            connection.send({"key": key})
            hello = connection.receive()[0]
        except OSError as error:
            # No file yet, or that of a server that has ended and may be started again.
            reason = error
            if plain is not None:
                plain.close()
            time.sleep(_POLL_S)
            continue
        plain.settimeout(timeout_s)
        return connection, hello
    raise CollectiveTimeout(
        f"no parameter server answered at {file} within {timeout_s:g} s: {reason}.",
        why="the server was not started, has ended, or its port cannot be reached from this host.",
        fix="see the log of the server; give the path that the server was given; open the port.",
        missing=[],
        waited_s=timeout_s,
    )


def _read_address(file: Path) -> tuple[str, int, str]:
    try:
        server = json.loads(file.read_text())
        return server["host"], server["port"], server["key"]
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{file} is not the file of a parameter server.",
            fix="give the path that ParameterServer was given.",
        ) from error


def _summed(parts: list[tuple[Tensor | None, Tensor]]) -> tuple[Tensor | None, Tensor]:
    """The gradient of a parameter or of rows of a table, from those of each pull since the last push."""
    ids = [i for i, _ in parts if i is not None]
    if len(parts) == 1:
        return parts[0]
    if not ids:
        return None, torch.stack([g for _, g in parts]).sum(0)
    gradient = torch.cat([g for _, g in parts])
    rows, where = torch.unique(torch.cat(ids), return_inverse=True)
    return rows, gradient.new_zeros((len(rows), *gradient.shape[1:])).index_add_(0, where, gradient)


def _part_of(
    summed: Mapping[str, tuple[Tensor | None, Tensor]], shard: int, count: int
) -> tuple[list[str], list[Tensor]]:
    """What one shard gets of a push. Of a table it may be no rows: its optimizer counts the step."""
    names, tensors = [], []
    for name, (rows, gradient) in summed.items():
        if rows is not None:
            mine = rows % count == shard
            tensors += [rows[mine], gradient[mine]]
        elif shard == 0:
            tensors.append(gradient)
        else:
            continue
        names.append(name)
    return names, tensors


def _refuse_optimizer(name: str, make: MakeOptimizer, table: Tensor) -> None:
    """Try the optimizer of a table with a sparse gradient of one row."""
    trial = nn.Parameter(torch.zeros((1, *table.shape[1:]), dtype=table.dtype))
    rows = torch.zeros_like(trial, requires_grad=False)
    trial.grad = torch.sparse_coo_tensor(
        torch.zeros((1, 1), dtype=torch.int64), rows, trial.shape, check_invariants=False
    )
    optimizer = make([trial])
    kind = type(optimizer).__name__
    fix = "use SGD without momentum, Adagrad or SparseAdam for tables."
    try:
        optimizer.step()
    except RuntimeError as error:
        raise ConfigError(
            f"{kind} cannot train table {name!r}: {error}.", why="rows are sparse.", fix=fix
        ) from error
    for key, value in optimizer.state.get(trial, {}).items():
        plain = isinstance(value, int | float | type(None))
        if not plain and not (isinstance(value, Tensor) and not value.is_sparse):
            raise ConfigError(
                f"{kind} cannot train table {name!r}: its state {key!r} is sparse or no number.",
                fix=fix,
            )


def _replace(path: Path, write: Callable[[Path], object]) -> None:
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
