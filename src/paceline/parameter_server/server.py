"""Parameter server: tables and their optimizers in server processes.

Workers may join, fail or leave at any time: they are not ranks of one job, so a worker that fails ends no
other. A worker pulls the rows that a batch uses, and pushes their gradients. The server applies each push at
once with a `torch.optim` optimizer.

`torch.distributed.rpc` is not used. After a member of its dynamic group is killed, no process can join or
leave the group (`test_torch_rpc_admits_nobody_after_a_member_was_killed`), and RPC unpickles what a peer
sends. Messages here are JSON and the bytes of tensors; a client must know the server's key.

Source of the staleness bound: Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server, NeurIPS 2013.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from paceline import log
from paceline.errors import CheckpointError, ConfigError, NonFinite, PacelineError, PeerFailed
from paceline.parameter_server.frames import NOTICE_S, POLL_S, Connection, Snapshot, replace_file

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_HELLO_S = 10.0  # how long the server waits for the header with the key
_HELLO_BYTES = 4096  # the largest such header
_MAX_UNAUTHENTICATED = 64  # connections, each with a thread; one more closes the oldest


class _Parameter:
    """A dense parameter, or this server's rows of a table, with its optimizer and its lock.

    Args:
        shard: Of a table: this server's index, and the number of servers.
    """

    def __init__(
        self, name: str, value: Tensor, make: MakeOptimizer, shard: tuple[int, int] | None
    ) -> None:
        self.is_table = shard is not None
        self.index, self.count = shard or (0, 1)
        self.shape = list(value.shape)
        rows = value[self.index :: self.count] if self.is_table else value
        if self.is_table:
            _refuse_optimizer(name, make, value)
        self.value = nn.Parameter(rows.detach().cpu().clone().contiguous())
        self.optimizer = make([self.value])
        self.lock = threading.Lock()

    def rows_of(self, ids: Tensor) -> Tensor:
        """The rows of `value` that are these rows of the whole table. Raises ConfigError."""
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
        rows = None if ids is None else self.rows_of(ids)
        first = self.value.shape[:1] if rows is None else rows.shape
        expected = (*first, *self.value.shape[1:]) if self.value.dim() else ()
        if tuple(gradient.shape) != expected or gradient.dtype != self.value.dtype:
            raise ConfigError(
                f"a gradient of shape {tuple(gradient.shape)} and {gradient.dtype} does not fit "
                f"{expected} and {self.value.dtype}."
            )
        if not bool(gradient.isfinite().all()):
            raise NonFinite("a pushed gradient has NaN or infinity.", quantity="gradient")
        return rows, gradient

    def apply(self, rows: Tensor | None, gradient: Tensor) -> None:
        with self.lock:
            if rows is not None:
                gradient = torch.sparse_coo_tensor(
                    rows[None], gradient, self.value.shape, check_invariants=False
                )
            self.value.grad = gradient
            self.optimizer.step()
            self.value.grad = None

    def read(self, ids: Tensor | None) -> Tensor:
        with self.lock:
            value = self.value.detach()
            return value.clone() if ids is None else value[self.rows_of(ids)]

    def state(self) -> dict[str, Any]:
        found = self.optimizer.state.get(self.value, {})
        return {
            k: v.clone() if isinstance(v, Tensor) else v for k, v in found.items() if v is not None
        }

    def load(self, value: Tensor, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            self.value.copy_(self._own_rows(value))
        for key, entry in state.items():
            own = self._own_rows(entry) if isinstance(entry, Tensor) else entry
            self.optimizer.state[self.value][key] = own

    def _own_rows(self, value: Tensor) -> Tensor:
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
        max_staleness: Largest number of pushes by which a worker may be ahead of the slowest one. The next
            pull of a worker that is further ahead waits. 0 keeps the workers in step. Only the value of
            shard 0 has an effect.
        worker_timeout_s: A worker that others wait for is dropped if it makes no request for so long after
            its last one was answered.

    Attributes:
        address: "host:port" while it listens.
        version: Number of pushes that have been applied. Shard 0 counts them; on other shards it stays 0, or
            the version of the snapshot that was loaded.

    Raises:
        ConfigError: a table without rows, a name that is used twice, an optimizer that does not take sparse
            gradients, all interfaces in `listen` (in any spelling), an address that cannot be bound, or a
            file that cannot be written.

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
        self._parameters: dict[str, _Parameter] = {}
        for name, value in [*tables.items(), *dense.items()]:
            make = optimizer.get(name) if isinstance(optimizer, Mapping) else optimizer
            if make is None:
                raise ConfigError(f"optimizer= has no entry for {name!r}.")
            if name in tables and (value.dim() < 2 or value.shape[0] == 0):
                raise ConfigError(f"table {name!r} must be (rows, ...), got {tuple(value.shape)}.")
            if not value.is_floating_point():
                raise ConfigError(f"{name!r} must have a floating-point dtype, got {value.dtype}.")
            if name in tables or self._index == 0:
                self._parameters[name] = _Parameter(
                    name, value, make, shard if name in tables else None
                )
        self._host, _, port = listen.rpartition(":")
        is_port = port.isdecimal() and int(port) < 1 << 16
        if not self._host.strip("[]*") or not is_port:
            raise _not_one_interface(listen)
        self._port, self._file = int(port), Path(file)
        self._max_staleness, self._worker_timeout_s = max_staleness, worker_timeout_s
        self._key = secrets.token_hex(32)
        self.address = ""
        self.version = 0
        self._changed = threading.Condition()  # guards everything below, and `version`
        self._unauthenticated: list[Connection] = []  # have not shown the key yet, oldest first
        self._connections: dict[int, Connection] = {}
        self._threads: list[threading.Thread] = []
        self._num_connected = 0  # workers so far; also the number of the newest
        self._steps: dict[int, int] = {}  # pushes of each worker that trains
        self._idle_since: dict[int, float] = {}  # when the last request of a worker was answered
        self._pushing: set[int] = set()
        self._snapshots: dict[int, tuple[dict[str, Any], list[Tensor]]] = {}  # not fetched yet
        self._paused_by: int | None = None  # the worker that takes a snapshot: see _pause
        self._failure: BaseException | None = None
        self._listener: socket.socket | None = None

    def load(self, snapshot: Snapshot) -> None:
        """Continue from `ServerClient.snapshot(optimizer=True)`, of any number of servers.

        Call it before the server listens.

        Raises:
            CheckpointError: names or shapes differ from those of this server, or the snapshot has no state of
                these optimizers.
        """
        values = snapshot["parameters"]
        unknown = sorted(values.keys() - self._parameters.keys())
        if unknown and self._index == 0:  # only this server knows the dense parameters too
            raise CheckpointError(
                f"the snapshot has {unknown[0]!r}, which this server does not have."
            )
        for name, parameter in self._parameters.items():
            if name not in values or list(values[name].shape) != parameter.shape:
                found = tuple(values[name].shape) if name in values else "nothing"
                raise CheckpointError(
                    f"the snapshot has {found} for {name!r}, not {tuple(parameter.shape)}."
                )
            saved = snapshot.get("optimizer", {}).get(name, {})
            if "optimizer" not in snapshot or parameter.state().keys() - saved.keys():
                raise CheckpointError(
                    f"the snapshot has no state of this optimizer for {name!r}.",
                    why="it was taken without optimizer=True, or with another optimizer.",
                    fix="use client.save(path), or client.snapshot(optimizer=True). To start the optimizers "
                    "again, pass the parameters to ParameterServer.",
                )
        for name, parameter in self._parameters.items():
            parameter.load(values[name], snapshot["optimizer"].get(name, {}))
        self.version = int(snapshot["version"])

    def __enter__(self) -> ParameterServer:
        try:
            info = socket.getaddrinfo(self._host.strip("[]"), self._port, type=socket.SOCK_STREAM)[
                0
            ]
            if ipaddress.ip_address(info[4][0]).is_unspecified:  # also "0", "0x0" and "::0"
                raise _not_one_interface(f"{self._host}:{self._port}")
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
                "the parameter server listens on %s: anyone who can read %s can read and change the "
                "parameters from other hosts, and the traffic is not encrypted; use a trusted network.",
                self.address,
                self._file,
            )
        text = json.dumps({"host": host, "port": port, "key": self._key})
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._file, lambda path: path.write_text(text))
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
        """Stop listening, remove the file, and close all connections. Workers get PeerFailed.

        A file that another server has written in its place stays.
        """
        listener, self._listener = self._listener, None
        if listener is None:
            return
        with contextlib.suppress(OSError):
            if self._key.encode() in self._file.read_bytes():
                self._file.unlink()
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        listener.close()
        while True:
            with self._changed:
                threads, self._threads = self._threads, []
                for connection in (*self._unauthenticated, *self._connections.values()):
                    connection.close()
                self._changed.notify_all()
            if not threads:
                return
            for thread in threads:
                thread.join()

    def wait(self, workers: int = 1) -> None:
        """Wait until `workers` workers have connected and none is connected any more.

        Every connection counts as a worker, also one that only takes a snapshot, and a worker that connects
        again counts again. A worker that was killed has left. Leave the `with` block to stop earlier.

        Raises:
            Exception: the error of an optimizer.
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
            thread.start()
            self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]

    def _accept(self, listener: socket.socket) -> None:
        while True:
            plain = None
            try:
                plain = listener.accept()[0]
                self._start(self._serve, Connection(plain))
            except (OSError, RuntimeError):
                if plain is not None:
                    plain.close()
                if self._listener is None:
                    return
                # The client has gone, or there are too many open files or threads.
                time.sleep(POLL_S)

    def _serve(self, connection: Connection) -> None:
        worker = 0  # not authenticated yet
        try:
            with self._changed:
                if self._listener is None:
                    return
                self._unauthenticated.append(connection)
                if len(self._unauthenticated) > _MAX_UNAUTHENTICATED:
                    self._unauthenticated.pop(0).close()
            if not self._has_key(connection):
                return
            with self._changed:
                self._drop_stranger(connection)
                self._num_connected += 1
                worker = self._num_connected
                self._connections[worker] = connection
            parameters = {
                name: [p.is_table, p.shape, str(p.value.dtype).removeprefix("torch.")]
                for name, p in self._parameters.items()
            }
            connection.send({"shard": [self._index, self._count], "parameters": parameters})
            self._answer_all(worker, connection)
        except OSError as error:
            log.logger.debug("worker %d has left: %s", worker, error)
        except Exception as error:  # where its next frame begins is unknown
            log.logger.warning(
                "worker %d was dropped: its request cannot be read or answered: %r", worker, error
            )
            with contextlib.suppress(OSError):
                connection.send(_refusal(_unanswered(error)))
        finally:
            connection.close()
            self._forget(worker, connection)

    def _drop_stranger(self, connection: Connection) -> None:
        if connection in self._unauthenticated:
            self._unauthenticated.remove(connection)

    def _has_key(self, connection: Connection) -> bool:
        try:
            key = connection.receive_header(_HELLO_BYTES, _HELLO_S)[0].get("key")
            given = str(key).encode()
        except (
            ValueError,
            AttributeError,
            RecursionError,
        ) as error:  # that malformed JSON can raise
            log.logger.debug("a connection without the key: %s", error)
            return False
        connection.socket.settimeout(None)
        return hmac.compare_digest(given, self._key.encode())

    def _answer_all(self, worker: int, connection: Connection) -> None:
        while True:
            header, tensors, _ = connection.receive()
            with self._changed:
                self._idle_since.pop(worker, None)
            try:
                reply, values = self._answer(worker, connection, header, tensors)
            except OSError:
                raise
            except PacelineError as error:
                reply, values = _refusal(error), []
            except Exception as error:  # a client of another version, or a faulty one
                log.logger.warning("a request of worker %d cannot be answered: %r", worker, error)
                reply, values = _refusal(_unanswered(error)), []
            with self._changed:  # before the reply: a stopped worker may never read it
                self._idle_since[worker] = time.monotonic()
            connection.send(reply, values)

    def _forget(self, worker: int, connection: Connection) -> None:
        with self._changed:
            self._drop_stranger(connection)
            self._connections.pop(worker, None)
            self._steps.pop(worker, None)
            self._idle_since.pop(worker, None)
            self._snapshots.pop(worker, None)
            self._pushing.discard(worker)
            if self._paused_by == worker:
                self._paused_by = None
            self._changed.notify_all()

    def _answer(
        self, worker: int, connection: Connection, header: dict[str, Any], tensors: list[Tensor]
    ) -> tuple[dict[str, Any], list[Tensor]]:
        task = header["do"]
        if task == "pull":
            if header["trains"]:
                with self._changed:
                    self._steps.setdefault(worker, min(self._steps.values(), default=0))
                self._wait(connection, lambda: self._may_pull(worker), self._slowest)
            given = iter(tensors)
            wanted = [self._find(name) for name in header["names"]]
            return {}, [p.read(next(given) if p.is_table else None) for p in wanted]
        if task == "push":
            return self._push(worker, connection, header, tensors)
        if task == "end":
            return self._end_push(worker), []
        if task == "pause":
            self._pause(worker, connection)
            return {}, []
        if task == "copy":
            copy = self._copy(header["optimizer"])
            with self._changed:
                self._snapshots[worker] = copy
            return {}, []
        if task == "resume":
            with self._changed:
                if self._paused_by == worker:
                    self._paused_by = None
                    self._changed.notify_all()
            return {}, []
        if task == "fetch":
            with self._changed:
                return self._snapshots.pop(worker)
        raise ConfigError(f"unknown request {task!r}.")

    def _find(self, name: str) -> _Parameter:
        if name not in self._parameters:
            raise ConfigError(f"this server has no parameter {name!r}.")
        return self._parameters[name]

    def _wait(
        self,
        connection: Connection,
        ready: Callable[[], bool],
        blockers: Callable[[], Iterable[int]],
        then: Callable[[], object] = lambda: None,
    ) -> None:
        """Wait until `ready`, or the server closes, and call `then` under the lock.

        Every NOTICE_S: drop the workers of `blockers` that have made no request for `worker_timeout_s`.
        """
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: ready() or self._listener is None, NOTICE_S):
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

    def _pause(self, worker: int, connection: Connection) -> None:
        """Let no push begin until this worker asks for "resume" or leaves; wait for those that have begun.

        A push to any number of servers begins and ends on server 0, so a pause of server 0 is enough for a
        snapshot of all of them.
        """

        def pause() -> None:
            self._paused_by = worker

        self._wait(connection, lambda: self._may_push(worker), self._pausing, pause)
        self._wait(connection, lambda: self._pushing <= {worker}, lambda: self._pushing)

    def _may_push(self, worker: int) -> bool:
        return self._paused_by in (None, worker)

    def _pausing(self) -> list[int]:
        return [] if self._paused_by is None else [self._paused_by]

    def _may_pull(self, worker: int) -> bool:
        return self._steps[worker] - min(self._steps.values()) <= self._max_staleness

    def _push(
        self,
        worker: int,
        connection: Connection,
        header: dict[str, Any],
        tensors: list[Tensor],
    ) -> tuple[dict[str, Any], list[Tensor]]:
        given, work = iter(tensors), []
        for name in header["names"]:
            parameter = self._find(name)
            ids = next(given) if parameter.is_table else None
            work.append((parameter, parameter.check(ids, next(given))))
        if self._index == 0:
            self._wait(
                connection,
                lambda: self._may_push(worker),
                self._pausing,
                lambda: self._pushing.add(worker),
            )
        try:
            for parameter, (rows, gradient) in work:
                parameter.apply(rows, gradient)
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            raise PeerFailed(
                f"the server failed: {error}",
                why="its optimizer raised this.",
                fix="see its log; start all servers again from a checkpoint.",
            ) from error
        return (self._end_push(worker) if self._count == 1 else {}), []

    def _end_push(self, worker: int) -> dict[str, Any]:
        with self._changed:
            self._pushing.discard(worker)
            self._steps[worker] = self._steps.get(worker, 0) + 1
            self.version += 1
            lead = self._steps[worker] - min(self._steps.values())
            self._changed.notify_all()
            return {"version": self.version, "lead": lead}

    def _copy(self, optimizer: bool) -> tuple[dict[str, Any], list[Tensor]]:
        """All values. The worker has paused pushes, so they belong to one version."""
        tensors, entries = [], []
        for name, parameter in self._parameters.items():
            for key, value in {
                "": parameter.read(None),
                **(parameter.state() if optimizer else {}),
            }.items():
                if isinstance(value, Tensor):
                    entries.append([name, key, None])
                    tensors.append(value)
                else:
                    entries.append([name, key, value])
        return {"version": self.version, "entries": entries}, tensors


def _refusal(error: PacelineError) -> dict[str, Any]:
    return {
        "error": type(error).__name__,
        "what": error.what,
        "why": error.why,
        "fix": error.fix,
    }


def _unanswered(error: Exception) -> ConfigError:
    return ConfigError(
        f"the server cannot answer this request: {error!r}.",
        fix="use the same version of paceline in servers and workers; see the log of the server.",
    )


def _not_one_interface(listen: str) -> ConfigError:
    return ConfigError(
        f"listen={listen!r} is not one interface and a port.",
        why="a server listens on the interface of its job only.",
        fix='give the address of that interface, as in "10.0.0.5:29510".',
    )


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
