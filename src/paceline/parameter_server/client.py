"""A worker of a parameter server: pulls the rows of a batch, and pushes their gradients."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import (
    CheckpointError,
    CollectiveTimeout,
    ConfigError,
    NonFinite,
    PacelineError,
    PeerFailed,
    StepError,
)
from paceline.parameter_server.frames import (
    DTYPES,
    NOTICE_S,
    POLL_S,
    Connection,
    Snapshot,
    replace_file,
)

_HELLO_BYTES = 1 << 24  # more is not the answer of a parameter server
_LEAST_TIMEOUT_S = 4 * NOTICE_S  # a server that lets a client wait is heard in this time

# What a server may answer instead of a value.
_ERRORS: dict[str, type[PacelineError]] = {
    e.__name__: e for e in (ConfigError, NonFinite, PeerFailed, StepError)
}


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
        StepError: of each method: this client is closed, by `close` or by an error in an earlier request.

    Collective: none.
    """

    def __init__(
        self,
        connections: list[Connection],
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
        self._why_closed = ""
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
        self._leave("close was called, or its `with` block has ended.")

    def _leave(self, why: str) -> None:
        self._why_closed = self._why_closed or why
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
            StepError: nothing that was pulled has a gradient.
            NonFinite: a gradient has NaN or infinity. Nothing was sent.
        """
        pulled, self._pulled = self._pulled, []
        used = [each for each in pulled if each[2].grad is not None]
        if not used:
            raise StepError(
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
                self._send(shard, {"do": "push", "names": names}, tensors, counts=True)
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
            {"version": int, "parameters": {name: tensor}}, on CPU, with whole tables, whatever the number of
            servers; with `optimizer` also "optimizer": {name: {key: tensor or number}}.
        """
        shards = range(len(self._connections))
        with self._closed_on_error():
            self._ask(0, {"do": "pause"})
            for shard in shards:
                self._send(shard, {"do": "copy", "optimizer": optimizer})
            for shard in shards:
                self._receive(shard)
            self._ask(0, {"do": "resume"})
            replies = [self._ask(shard, {"do": "fetch"}) for shard in shards]
        merged: Snapshot = {"version": replies[0][0]["version"], "parameters": {}}
        if optimizer:
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
            replace_file(Path(path), lambda scratch: torch.save(content, scratch))
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
        # In float32, because squares of float16 overflow above 255.
        wide = [g.float() if g.dtype.itemsize < 4 else g for g in gradients.values()]
        norm = nn.utils.get_total_norm(wide)
        if not bool(norm.isfinite()):
            wrong = [name for name, g in gradients.items() if not bool(g.isfinite().all())]
            raise NonFinite(
                f"gradients of {', '.join(wrong)} have NaN or infinity."
                if wrong
                else f"the norm of the gradients of {', '.join(gradients)} is more than {norm.dtype} holds.",
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
            header = reply[0]
            if "error" in header:
                raise _ERRORS.get(header["error"], PacelineError)(
                    header["what"],
                    where=f"server {shard} of {len(self._connections)}",
                    why=header["why"],
                    fix=header["fix"],
                )
            if "waiting" not in header:
                return reply

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """Leave if a request breaks off. Raises StepError if this client has left.

        An unread reply would be taken for the next one, and server 0 may hold back the requests of others
        until this one ends.
        """
        if self._why_closed:
            raise StepError(
                "this client is closed.",
                why=self._why_closed,
                fix="connect again with connect_server.",
            )
        try:
            yield
        except BaseException as error:
            self._leave(f"an earlier request ended in {type(error).__name__}.")
            raise

    @contextlib.contextmanager
    def _explained(self, shard: int) -> Iterator[None]:
        where = f"server {shard} of {len(self._connections)}"
        try:
            yield
        except TimeoutError as error:
            raise CollectiveTimeout(
                f"the parameter server did not answer within {self._timeout_s:g} s.",
                where=where,
                why="it is stopped or overloaded, or the network is interrupted.",
                fix="see its log; connect again with connect_server, or raise timeout_s.",
                missing=[shard],
                waited_s=self._timeout_s,
            ) from error
        except OSError as error:
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
        timeout_s: How long to wait for the server, here and in each request; at least 1. Waiting for slower
            workers does not count.
        device: Where pulled values are.

    Raises:
        ConfigError: no file, a file of something else, files of different servers or in the wrong order, or a
            wrong `clip_norm` or `timeout_s`.
        CollectiveTimeout: no server listened in time.

    Collective: none. A worker may connect at any time.
    """
    if not files:
        raise ConfigError("connect_server needs the file of each server.")
    if clip_norm is not None and not clip_norm > 0:
        raise ConfigError(f"clip_norm must be more than 0, got {clip_norm}.")
    if not timeout_s >= _LEAST_TIMEOUT_S:
        raise ConfigError(
            f"timeout_s must be at least {_LEAST_TIMEOUT_S:g}, got {timeout_s}.",
            why=f"a server is heard every {NOTICE_S:g} s while a worker waits for others.",
        )
    connections: list[Connection] = []
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
                parameters.setdefault(name, (is_table, shape, DTYPES[dtype]))
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


def _connect(file: Path, deadline: float, timeout_s: float) -> tuple[Connection, dict[str, Any]]:
    reason: Exception = FileNotFoundError(f"{file} does not exist")
    while (left := deadline - time.monotonic()) > 0:
        plain = None
        try:
            host, port, key = _read_address(file)
            plain = socket.create_connection((host, port), left)
            connection = Connection(plain)
            connection.send({"key": key})
            hello, _ = connection.receive_header(_HELLO_BYTES)
        except ConfigError:
            raise  # the file is not that of a server
        except (OSError, ValueError, RecursionError) as error:
            # No file yet, or that of a server that has ended: it may be started again, or another service may
            # have its port.
            reason = error
            if plain is not None:
                plain.close()
            time.sleep(POLL_S)
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
