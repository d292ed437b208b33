"""The parameter server: equal to one process, bounded staleness, killed and joining workers, snapshots.

Tests of one worker, or of the server alone, run it in this process. Those of failures start processes.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import rpc

import paceline
from paceline.parameter_server import server as server_module
from paceline.parameter_server.frames import Connection
from paceline.testing import digest

USERS, ITEMS, WIDTH = 60, 40, 8
PUSHES, BATCH, RATE = 450, 64, 0.5
TIMEOUT_S = 30.0
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "torch.distributed", "torch._dynamo", "paceline.parallel.ddp"]
)


def _adagrad(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=RATE)


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def _sparse_adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(parameters, lr=0.01)


def _tables() -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(1)
    return {
        "users": torch.randn(USERS, WIDTH, generator=source) / 4,
        "items": torch.randn(ITEMS, WIDTH, generator=source) / 4,
    }


def _batch(
    seed: int, step: int, size: int = BATCH, *, distinct: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of a user and an item, and whether the user likes it: the sign of a hidden product."""
    hidden = torch.Generator().manual_seed(0)
    tastes, traits = (
        torch.randn(USERS, 3, generator=hidden),
        torch.randn(ITEMS, 3, generator=hidden),
    )
    source = torch.Generator().manual_seed(seed * 1_000_003 + step)
    users = torch.randint(USERS, (size,), generator=source)
    items = torch.randint(ITEMS, (size,), generator=source)
    if distinct:
        users = torch.randperm(USERS, generator=source)[: ITEMS // 2]
        items = torch.randperm(ITEMS, generator=source)[: ITEMS // 2]
    return users, items, ((tastes[users] * traits[items]).sum(1) > 0).float()


def _loss(users: Tensor, items: Tensor, likes: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits((users * items).sum(1), likes)


def _accuracy(tables: dict[str, Tensor]) -> float:
    users, items, likes = _batch(99, 0, 4000)
    scores = (tables["users"][users] * tables["items"][items]).sum(1)
    return float(((scores > 0) == (likes > 0)).float().mean())


def _step(client: paceline.ServerClient, seed: int, step: int, *, distinct: bool = False) -> None:
    users, items, likes = _batch(seed, step, distinct=distinct)
    _loss(client.pull("users", users), client.pull("items", items), likes).backward()
    client.push()


def _alone(
    make: Callable[..., torch.optim.Optimizer], steps: int, *, distinct: bool = False
) -> dict[str, Tensor]:
    """The same training in one process, with `nn.Embedding(sparse=True)`."""
    modules = {
        name: nn.Embedding.from_pretrained(value.clone(), freeze=False, sparse=True)
        for name, value in _tables().items()
    }
    optimizers = [make([module.weight]) for module in modules.values()]
    for step in range(steps):
        users, items, likes = _batch(0, step, distinct=distinct)
        for optimizer in optimizers:
            optimizer.zero_grad()
        _loss(modules["users"](users), modules["items"](items), likes).backward()
        for optimizer in optimizers:
            optimizer.step()
    return {name: module.weight.detach() for name, module in modules.items()}


def _servers(
    folder: Path, count: int = 1, make: Any = _adagrad, **options: Any
) -> list[paceline.ParameterServer]:
    return [
        paceline.ParameterServer(
            _tables(), make, folder / f"{index}.json", shard=(index, count), **options
        )
        for index in range(count)
    ]


class _Connected:
    """Servers of this process, and clients of them."""

    def __init__(self, folder: Path, count: int = 1, make: Any = _adagrad, **options: Any) -> None:
        self.servers = _servers(folder, count, make, **options)
        self.files = [folder / f"{index}.json" for index in range(count)]

    def __enter__(self) -> _Connected:
        for server in self.servers:
            server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.close()

    def client(self, **options: Any) -> paceline.ServerClient:
        return paceline.connect_server(*self.files, **({"timeout_s": TIMEOUT_S} | options))


@pytest.mark.parametrize("make", [_sgd, _adagrad, _sparse_adam])
@pytest.mark.parametrize("count", [1, 3])
def test_one_worker_trains_as_one_process(tmp_path: Path, make: Any, count: int) -> None:
    for distinct in (True, False):
        with _Connected(tmp_path, count, make, max_staleness=0) as to, to.client() as client:
            for step in range(10):
                _step(client, 0, step, distinct=distinct)
            found = client.snapshot()
        assert found["version"] == 10
        assert [server.version for server in to.servers] == [10, 0, 0][:count]
        expected = _alone(make, 10, distinct=distinct)
        assert not torch.equal(expected["users"], _tables()["users"])
        if distinct:
            assert digest(found["parameters"]) == digest(expected)
        else:
            # torch adds up the parts of a row that a batch uses several times in another order.
            torch.testing.assert_close(found["parameters"], expected, rtol=1e-5, atol=1e-5)


def test_a_snapshot_continues_on_another_number_of_servers(tmp_path: Path) -> None:
    with _Connected(tmp_path, 2) as to, to.client() as client:
        for step in range(10):
            _step(client, 0, step, distinct=True)
        assert client.save(tmp_path / "saved.pt") == 10
        values = client.snapshot()
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    for snapshot in (values, {**values, "optimizer": {}}):  # the latter as that of SGD
        with pytest.raises(paceline.CheckpointError, match=r"no state(.|\n)*optimizer=True"):
            _Connected(tmp_path, 1).servers[0].load(snapshot)
    for count in (1, 3):
        to = _Connected(tmp_path, count)
        for server in to.servers:
            server.load(saved)
        with to, to.client() as client:
            for step in range(10, 20):
                _step(client, 0, step, distinct=True)
            found = client.snapshot()
        assert found["version"] == 20
        assert digest(found["parameters"]) == digest(_alone(_adagrad, 20, distinct=True))
    assert {path.name for path in tmp_path.iterdir()} == {"saved.pt"}


def test_dense_parameters_and_clipping(tmp_path: Path) -> None:
    table, weight = torch.ones(5, 2), torch.full((2, 1), 2.0)
    make = {"rows": _sgd, "weight": lambda p: torch.optim.Adam(p, lr=0.1)}
    server = paceline.ParameterServer(
        {"rows": table}, make, tmp_path / "s", dense={"weight": weight}
    )
    with server, paceline.connect_server(tmp_path / "s", clip_norm=0.5) as client:
        rows, dense = client.pull("rows", torch.tensor([[1, 3], [3, 3]])), client.pull_dense()
        assert rows.shape == (2, 2, 2)
        (rows @ dense["weight"]).sum().backward()
        client.push()
        found = client.snapshot()["parameters"]
    # The gradients are (2, 2) for row 1, three times that for row 3, and (4, 4) for the weight.
    gradient = torch.tensor([[0.0, 0], [2, 2], [0, 0], [6, 6], [0, 0]])
    norm = (gradient.square().sum() + 32).sqrt()
    torch.testing.assert_close(found["rows"], table - RATE * 0.5 / norm * gradient)
    torch.testing.assert_close(found["weight"], weight - 0.1)


@pytest.mark.parametrize("count", [1, 2])
def test_gradients_of_several_pulls_are_added_before_they_are_clipped(
    tmp_path: Path, count: int
) -> None:
    with _Connected(tmp_path, count, _sgd) as to, to.client(clip_norm=1.0) as client:
        for ids in ([2, 3], [3, 4]):
            client.pull("users", torch.tensor(ids)).sum().backward()
        client.push()
        change = (_tables()["users"] - client.snapshot()["parameters"]["users"]) / RATE
    gradient = torch.zeros(USERS, WIDTH)
    gradient[2:5] = torch.tensor([[1.0], [2.0], [1.0]])
    torch.testing.assert_close(change, gradient / gradient.norm())


def test_finite_gradients_of_16_bits_may_have_a_large_norm(tmp_path: Path) -> None:
    table = torch.zeros(100, 64, dtype=torch.float16)
    server = paceline.ParameterServer({"rows": table}, _sgd, tmp_path / "s")
    with server, paceline.connect_server(tmp_path / "s", clip_norm=8.0) as client:
        (client.pull("rows", torch.arange(100)) * 1000).sum().backward()  # of norm 80 000
        client.push()
        found = client.snapshot()["parameters"]["rows"]
    torch.testing.assert_close(found, torch.full_like(table, -0.1 * RATE))


def test_a_norm_that_overflows_is_not_called_a_gradient_that_does(tmp_path: Path) -> None:
    table = torch.zeros(2, 2)
    server = paceline.ParameterServer({"rows": table}, _sgd, tmp_path / "s")
    with server, paceline.connect_server(tmp_path / "s") as client:
        (client.pull("rows", torch.arange(2)) * 1e38 * 3).sum().backward()
        with pytest.raises(
            paceline.NonFinite, match=r"norm .* of rows is more than torch\.float32"
        ):
            client.push()


def test_bytes_pulled_are_those_of_the_rows_used(tmp_path: Path) -> None:
    wide = {"rows": torch.zeros(5000, 256)}
    sizes = []
    with paceline.ParameterServer(wide, _sgd, tmp_path / "s"):
        for count in (10, 100, 1000):
            with paceline.connect_server(tmp_path / "s") as client:
                ids = torch.arange(count).repeat(3)  # each row is sent once
                client.pull("rows", ids).sum().backward()
                client.push()
                sizes.append((client.bytes_pulled, client.bytes_pushed))
    for count, (pulled, pushed) in zip((10, 100, 1000), sizes, strict=True):
        assert 0 < pulled - count * 256 * 4 < 100  # the header
        assert 0 < pushed - count * (256 * 4 + 8) < 200


@pytest.mark.parametrize("bound", [0, 2])
def test_a_fast_worker_waits_for_the_slowest(tmp_path: Path, bound: int) -> None:
    with (
        _Connected(tmp_path, max_staleness=bound) as to,
        to.client() as slow,
        to.client(timeout_s=1.0) as fast,  # waiting for `slow` does not count
    ):
        slow.pull("users", torch.tensor([0]))  # it has joined, and has not pushed
        leads, waits = [], threading.Event()

        def race() -> None:
            for step in range(bound + 3):
                if step == bound + 1:
                    waits.set()
                _step(fast, 1, step)
                leads.append(fast.lead)

        with ThreadPoolExecutor() as pool:
            racing = pool.submit(race)
            assert waits.wait(TIMEOUT_S)
            assert racing in wait([racing], 1.3).not_done
            with to.client() as watching:
                assert watching.snapshot()["version"] == bound + 1  # it cannot go on
            _step(slow, 0, 0)
            _step(slow, 0, 1)
            racing.result(TIMEOUT_S)
    assert max(leads) == bound + 1
    assert len(leads) == bound + 3


def test_a_worker_without_requests_is_dropped(tmp_path: Path) -> None:
    with _Connected(tmp_path, max_staleness=0, worker_timeout_s=0.5) as to:
        with to.client() as silent, to.client() as fast:
            silent.pull("users", torch.tensor([0])).sum().backward()
            for step in range(3):
                _step(fast, 1, step)
            assert fast.version == 3
            with pytest.raises(
                paceline.PeerFailed, match="connection to the parameter server is c"
            ):
                silent.push()
        with to.client() as again:
            _step(again, 0, 0)


def test_a_worker_that_does_not_read_its_reply_is_dropped(tmp_path: Path) -> None:
    wide = {"rows": torch.zeros(1 << 18, 64)}  # 64 MiB do not fit the buffers of a socket
    options: dict[str, Any] = {"max_staleness": 0, "worker_timeout_s": 0.5}
    with paceline.ParameterServer(wide, _sgd, tmp_path / "s", **options):
        stopped, fast = (paceline.connect_server(tmp_path / "s") for _ in range(2))
        header = {"do": "pull", "names": ["rows"], "trains": True}
        stopped._send(0, header, [torch.arange(1 << 18)])

        def push() -> None:
            for _ in range(3):
                fast.pull("rows", torch.tensor([0])).sum().backward()
                fast.push()

        with ThreadPoolExecutor() as pool:
            pushing = pool.submit(push)
            done = wait([pushing], TIMEOUT_S).done
            stopped.close()
            fast.close()
        assert pushing in done
        assert fast.version == 3


@pytest.mark.parametrize("count", [1, 2])
def test_nobody_waits_forever_for_a_client_that_stopped(tmp_path: Path, count: int) -> None:
    with _Connected(tmp_path, count, worker_timeout_s=0.5) as to:
        with to.client() as frozen, to.client() as worker:
            frozen._ask(0, {"do": "pause"})  # in the middle of a snapshot
            _step(worker, 0, 0)
            assert worker.version == 1
        with to.client() as frozen, to.client() as watching:
            frozen._ask(0, {"do": "push", "names": []})
            # One server has ended that push. Of several, it is in the middle of it.
            assert watching.snapshot()["version"] == (2 if count == 1 else 1)


@pytest.mark.parametrize("count", [1, 2])
def test_a_snapshot_has_all_tables_at_one_version(tmp_path: Path, count: int) -> None:
    """Each push subtracts 1 from all rows of both tables, so their values show the version."""
    tables = {"a": torch.zeros(64, 4), "b": torch.zeros(64, 4)}

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    files = [tmp_path / f"{index}.json" for index in range(count)]
    servers = [
        paceline.ParameterServer(tables, make, file, shard=(index, count), max_staleness=1000)
        for index, file in enumerate(files)
    ]
    stop = threading.Event()

    def push() -> None:
        with paceline.connect_server(*files) as client:
            while not stop.is_set():
                ids = torch.arange(64)
                (client.pull("a", ids).sum() + client.pull("b", ids).sum()).backward()
                client.push()

    for server in servers:
        server.__enter__()
    with ThreadPoolExecutor() as pool:
        pushing = [pool.submit(push) for _ in range(2)]
        versions: list[int] = []
        try:
            with paceline.connect_server(*files) as client:
                while not versions or versions[-1] < 60:
                    found = client.snapshot()
                    versions.append(found["version"])
                    for value in found["parameters"].values():
                        assert value.unique().tolist() == [-found["version"]]
        finally:
            stop.set()
        for each in pushing:
            each.result(TIMEOUT_S)
    for server in servers:
        server.close()
    assert len(set(versions)) > 2


def _work(
    pipe: multiprocessing.connection.Connection, files: list[Path], seed: int, role: str
) -> None:
    torch.set_num_threads(1)
    if role == "joins":
        pipe.recv()
    with paceline.connect_server(*files, timeout_s=TIMEOUT_S) as client:
        if role != "joins":
            pipe.send(0)
            pipe.recv()  # begin together: a worker alone may take any number of steps
        step = 0
        while client.version < PUSHES:
            _step(client, seed, step)
            step += 1
            if step == 1:
                pipe.send(step)
            if step == 50 and role == "killed":
                pipe.send(step)
                pipe.recv()  # the others wait for this worker until it is killed
        pipe.send((step, client.lead))


def _start(
    files: list[Path], seed: int, role: str = ""
) -> tuple[Any, multiprocessing.connection.Connection]:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_work, args=(theirs, files, seed, role))
    process.start()
    theirs.close()
    return process, ours


def _receive(pipe: multiprocessing.connection.Connection) -> Any:
    assert pipe.poll(TIMEOUT_S), "a worker did not report"
    return pipe.recv()


@pytest.mark.ci
def test_three_workers_one_killed_one_joining(tmp_path: Path) -> None:
    with _Connected(tmp_path, make=_adagrad, max_staleness=4) as to:
        killed, *others = (_start(to.files, 1, "killed"), _start(to.files, 2), _start(to.files, 3))
        joins = _start(to.files, 4, "joins")
        assert [_receive(pipe) for _, pipe in (killed, *others)] == [0, 0, 0]
        for _, pipe in (killed, *others):
            pipe.send("go")
        assert [_receive(pipe) for _, pipe in (killed, *others)] == [1, 1, 1]
        assert _receive(killed[1]) == 50
        joins[1].send("go")
        assert _receive(joins[1]) == 1
        assert to.servers[0].version < PUSHES // 2
        killed[0].kill()
        killed[0].join()
        for process, pipe in (*others, joins):
            steps, lead = _receive(pipe)
            assert steps > 50
            assert lead <= 5
            process.join()
            assert process.exitcode == 0
        to.servers[0].wait(workers=4)
        with to.client() as client:
            found = client.snapshot()
    synchronous = _accuracy(_alone(_adagrad, PUSHES))
    assert found["version"] >= PUSHES
    assert synchronous > 0.98
    assert abs(_accuracy(found["parameters"]) - synchronous) < 0.01


def test_torch_rpc_admits_nobody_after_a_member_was_killed() -> None:
    """Why the parameter server does not use torch.distributed.rpc. If this fails, think about it again."""
    with _rpc_members() as start:
        first, address = start("first", 0, None)
        killed, _ = start("killed", 1, address)
        killed.kill()
        killed.join()
        _, joined = start("late", 2, address)
        assert joined is None, "RPC has learned to leave a dead member out"
        assert first.is_alive()


def _rpc_member(
    pipe: multiprocessing.connection.Connection, name: str, rank: int, port: int
) -> None:
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=3)
    try:
        rpc.init_rpc(name, rank=rank, rpc_backend_options=options)
    except (RuntimeError, torch.distributed.DistError):
        pipe.send(None)
        return
    pipe.send(port)
    pipe.recv()  # until the parent ends this process


class _rpc_members:
    def __enter__(self) -> Callable[..., tuple[Any, int | None]]:
        self._started: list[tuple[Any, multiprocessing.connection.Connection]] = []
        return self._start

    def _start(self, name: str, rank: int, port: int | None) -> tuple[Any, int | None]:
        if port is None:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_rpc_member, args=(theirs, name, rank, port))
        process.start()
        theirs.close()
        self._started.append((process, ours))
        return process, _receive(ours)

    def __exit__(self, *_: object) -> None:
        for process, pipe in self._started:
            process.kill()
            process.join()
            pipe.close()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[paceline.ServerClient]:
    with _Connected(tmp_path) as to, to.client() as client:
        yield client


def test_wrong_requests(client: paceline.ServerClient) -> None:
    with pytest.raises(paceline.ConfigError, match=r"no table 'user'(.|\n)*did you mean 'users'"):
        client.pull("user", torch.tensor([0]))
    for row in (-1, USERS):
        with pytest.raises(
            paceline.ConfigError, match=f"row {row} is not in table 'users' of 60 rows"
        ):
            client.pull("users", torch.tensor([3, row]))
    with pytest.raises(paceline.ConfigError, match=r"must be an int64 tensor, got torch\.int32"):
        client.pull("users", torch.tensor([0], dtype=torch.int32))
    with pytest.raises(paceline.ConfigError, match="must be an int64 tensor, got list"):
        client.pull("users", [0, 1])  # type: ignore[arg-type]
    with pytest.raises(paceline.StepError, match="nothing to push"):
        client.push()
    (client.pull("users", torch.tensor([0])) * float("nan")).sum().backward()
    with pytest.raises(paceline.NonFinite, match="gradients of users have NaN"):
        client.push()
    with torch.no_grad():
        assert not client.pull("users", torch.tensor([0])).requires_grad
    assert client.pull("users", torch.empty(0, 2, dtype=torch.int64)).shape == (0, 2, WIDTH)
    assert client.snapshot()["version"] == 0


def test_the_server_checks_what_a_client_sends(client: paceline.ServerClient) -> None:
    ids, good = torch.tensor([1]), torch.zeros(1, WIDTH)
    push = {"do": "push", "names": ["users"]}
    for header, tensors, text in (
        ({"do": "jump"}, [], "unknown request 'jump'"),
        (push | {"names": ["nobody"]}, [], "no parameter 'nobody'"),
        (push, [torch.tensor([USERS]), good], "row ids must be"),
        (push, [ids, torch.zeros(1, 3)], "does not fit"),
        (push, [ids, good.double()], "does not fit"),
    ):
        with pytest.raises(paceline.ConfigError, match=text):
            client._ask(0, header, tensors)
    with pytest.raises(paceline.NonFinite, match="pushed gradient"):
        client._ask(0, push, [ids, good / 0])
    assert client._ask(0, push, [ids, good])[0] == {"version": 1, "lead": 0, "tensors": []}


def test_the_reason_and_the_fix_of_a_refusal_reach_the_worker(tmp_path: Path) -> None:
    ids, gradient = torch.tensor([1]), torch.zeros(1, WIDTH)
    text = r"on another server(.|\n)*fix: +give all files"
    with _Connected(tmp_path, 2) as to, to.client() as client:
        with pytest.raises(paceline.ConfigError, match=text):
            client._ask(0, {"do": "push", "names": ["users"]}, [ids, gradient])
        client._ask(1, {"do": "push", "names": ["users"]}, [ids, gradient])


def test_a_malformed_request_is_refused_and_the_server_goes_on(tmp_path: Path) -> None:
    with _Connected(tmp_path) as to:
        with to.client() as wrong, to.client() as right:
            for request in (
                *({}, {"do": ["pull"]}, {"do": "fetch"}, {"do": "copy"}, {"do": "pull"}),
                {"do": "pull", "names": 5, "trains": False},
                {"do": "pull", "names": ["users"], "trains": False},
                *({"do": "push"}, {"do": "push", "names": ["users"]}),
            ):
                with pytest.raises(paceline.ConfigError, match=r"cannot answer|unknown request"):
                    wrong._ask(0, request)
            _step(wrong, 0, 0)
            _step(right, 0, 1)
            assert right.version == 2
        for text in (b"{}", b"[]", b"\xff", b"{", b'{"tensors": [["text", [1]]]}'):
            with to.client() as wrong:
                wrong._connections[0].socket.sendall(len(text).to_bytes(4, "big") + text)
                with pytest.raises(paceline.ConfigError, match="the server cannot answer"):
                    wrong._receive(0)
                with pytest.raises(paceline.PeerFailed, match="is closed"):
                    wrong._ask(0, {"do": "pause"})
        with to.client() as right:
            _step(right, 0, 2)
        to.servers[0].wait()  # raises if a request made the server fail


def test_only_the_worker_that_paused_pushes_resumes_them(tmp_path: Path) -> None:
    with (
        _Connected(tmp_path) as to,
        ThreadPoolExecutor() as pool,
        to.client() as pauses,
        to.client() as other,
        to.client() as pushes,
    ):
        pauses._ask(0, {"do": "pause"})
        pauses._ask(0, {"do": "pause"})  # does not wait for itself
        other._ask(0, {"do": "resume"})
        pushing = pool.submit(_step, pushes, 0, 0)
        assert pushing in wait([pushing], 0.3).not_done
        pauses._ask(0, {"do": "resume"})
        pushing.result(TIMEOUT_S)


def test_a_connection_without_the_key_is_closed(tmp_path: Path) -> None:
    with _Connected(tmp_path) as to:
        host, _, port = to.servers[0].address.partition(":")
        assert (tmp_path / "0.json").stat().st_mode & 0o777 == 0o600
        for text in (
            *(b'{"key": "0", "tensors": []}', b"[]", b"GET / HTTP/1.1", b"", b"\xff" * 5000),
            b"[" * 4000,  # nested too deep
            b'{"key": "\\ud800", "tensors": []}',  # not text
            b'{"key": "0", "tensors": [["float32", [-1, 0]]]}',
        ):
            with socket.create_connection((host, int(port)), TIMEOUT_S) as plain:
                plain.sendall(len(text).to_bytes(4, "big") + text)
                plain.settimeout(TIMEOUT_S)
                try:
                    assert plain.recv(100) == b""
                except ConnectionResetError:
                    assert len(text) == 5000  # closed before it was read
        with to.client() as client:
            _step(client, 0, 0)
        to.servers[0].wait()  # raises if a connection made the server fail


def test_close_does_not_wait_for_a_connection_that_shows_no_key(tmp_path: Path) -> None:
    (server,) = _servers(tmp_path)
    with server:
        host, _, port = server.address.partition(":")
        with socket.create_connection((host, int(port)), TIMEOUT_S):
            deadline = time.monotonic() + TIMEOUT_S
            while len(server._threads) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)  # until it is accepted
            began = time.monotonic()
            server.close()
            assert time.monotonic() - began < 5


def test_close_leaves_the_file_of_the_server_that_took_its_place(tmp_path: Path) -> None:
    (first,), (second,) = _servers(tmp_path), _servers(tmp_path)
    with first, second:
        first.close()
        with paceline.connect_server(tmp_path / "0.json", timeout_s=TIMEOUT_S) as client:
            _step(client, 0, 0)
    assert not (tmp_path / "0.json").exists()


def test_a_connection_that_breaks_off_at_once_does_not_end_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError("not connected"), RuntimeError("can't start new thread")]

    class Breaks(Connection):
        def __init__(self, plain: socket.socket) -> None:
            if failures:
                raise failures.pop()
            super().__init__(plain)

    monkeypatch.setattr(server_module, "Connection", Breaks)
    with _Connected(tmp_path) as to, to.client(timeout_s=5.0) as client:
        _step(client, 0, 0)
    assert not failures


def test_both_ends_find_out_that_the_host_of_the_other_is_lost(tmp_path: Path) -> None:
    with _Connected(tmp_path) as to, to.client() as client:
        for connection in (*client._connections, *to.servers[0]._connections.values()):
            assert connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            if hasattr(socket, "TCP_KEEPIDLE"):
                found = [
                    connection.socket.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                ]
                assert found[0] + found[1] * found[2] <= 60


def test_wrong_servers(tmp_path: Path) -> None:
    def server(tables: Any = None, make: Any = _sgd, **options: Any) -> paceline.ParameterServer:
        tables = _tables() if tables is None else tables
        return paceline.ParameterServer(tables, make, tmp_path / "s", **options)

    foreign, folder = tmp_path / "foreign", tmp_path / "file" / "folder"
    foreign.write_text('{"a": 1}')
    folder.parent.touch()
    in_no_folder = paceline.ParameterServer(_tables(), _sgd, folder / "s")
    for text, call in (
        ("no parameters", lambda: server({})),
        ("not one interface and a port", lambda: server(listen="127.0.0.1:99999")),
        ("not the file of a parameter server", lambda: paceline.connect_server(foreign)),
        ("cannot be written: Not a directory", in_no_folder.__enter__),
        ("Adam cannot train table 'users'", lambda: server(make=torch.optim.Adam)),
        (
            "state 'momentum_buffer' is sparse",
            lambda: server(make=lambda p: torch.optim.SGD(p, lr=1, momentum=0.9)),
        ),
        ("no entry for 'items'", lambda: server(make={"users": _sgd})),
        ("is a table and a dense parameter", lambda: server(dense={"users": torch.zeros(1)})),
        (r"must be \(rows, ...\)", lambda: server({"a": torch.zeros(3)})),
        ("floating-point dtype", lambda: server({"a": torch.zeros(3, 2, dtype=torch.int64)})),
        ("not one interface", lambda: server(listen="*:0")),
        ("not one interface", lambda: server(listen="29510")),
        ("not an index", lambda: server(shard=(2, 2))),
        ("at least 0", lambda: server(max_staleness=-1)),
        ("cannot listen on 192.0.2.1:0", lambda: server(listen="192.0.2.1:0").__enter__()),
        ("needs the file", paceline.connect_server),
        ("must be at least 1, got 0.5", lambda: paceline.connect_server(foreign, timeout_s=0.5)),
        ("must be more than 0", lambda: paceline.connect_server(tmp_path, clip_norm=0.0)),
    ):
        with pytest.raises(paceline.ConfigError, match=text):
            call()
    for host in ("0.0.0.0", "0", "0.0", "0x0", "::", "[::]", "[::0]"):
        with pytest.raises(paceline.ConfigError, match="not one interface"):
            server(listen=f"{host}:0").__enter__()
    with pytest.raises(paceline.CheckpointError, match="nothing for 'users'"):
        server().load({"version": 0, "parameters": {}})
    with pytest.raises(paceline.CheckpointError, match="has 'more', which this server does not"):
        server().load({"version": 0, "parameters": {**_tables(), "more": torch.zeros(1, 2)}})
    with pytest.raises(paceline.CollectiveTimeout, match=r"within 1 s: .*No such file"):
        paceline.connect_server(tmp_path / "none", timeout_s=1.0)
    reason = "of server 1 of 2, and was given as 0 of 2"
    with _Connected(tmp_path, 2) as to, pytest.raises(paceline.ConfigError, match=reason):
        paceline.connect_server(*reversed(to.files))


def test_a_server_that_ends_or_stops_answering(tmp_path: Path) -> None:
    with _Connected(tmp_path) as to:
        client = to.client(timeout_s=1.0)
        to.servers[0]._parameters["users"].lock.acquire()  # as an overloaded server
        with pytest.raises(paceline.CollectiveTimeout, match="did not answer within 1 s"):
            client.pull("users", torch.tensor([0]))
        with pytest.raises(
            paceline.StepError, match=r"is closed(.|\n)*ended in CollectiveTimeout(.|\n)*again"
        ):
            client.snapshot()
        to.servers[0]._parameters["users"].lock.release()
        client = to.client()
        to.servers[0].close()
        with pytest.raises(paceline.PeerFailed, match="is closed"):
            client.pull("users", torch.tensor([0]))
        client.close()
        with pytest.raises(paceline.StepError, match="an earlier request ended in PeerFailed"):
            client.pull("users", torch.tensor([0]))


def test_a_client_that_was_closed_says_so(client: paceline.ServerClient) -> None:
    client.pull("users", torch.tensor([0])).sum().backward()
    client.close()
    for call in (
        lambda: client.pull("users", torch.tensor([0])),
        client.push,
        client.pull_dense,
        client.snapshot,
    ):
        with pytest.raises(paceline.StepError, match=r"client is closed(.|\n)*close was call"):
            call()


@pytest.mark.parametrize("count", [1, 3])
def test_an_optimizer_that_fails_ends_the_server(tmp_path: Path, count: int) -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            if len(self.param_groups[0]["params"][0]) > 1:
                raise RuntimeError("out of order")

    with _Connected(tmp_path, count) as to, to.client() as client:
        failing = to.servers[min(1, count - 1)]
        for parameter in failing._parameters.values():
            parameter.optimizer = Fails([parameter.value])
        with pytest.raises(paceline.PeerFailed, match="the server failed: out of order"):
            _step(client, 0, 0)
        with pytest.raises(RuntimeError, match="out of order"):
            failing.wait()
        with pytest.raises(paceline.PeerFailed, match="is closed"):
            client._ask(0, {"do": "end"})  # it has left, so nobody waits for the end of its push


@pytest.mark.ci
def test_the_example(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs/howto/parameter_server.md").read_text()
    block = re.findall(r"```\n(python examples/embedding_server.py .*?)```", page, re.DOTALL)[0]
    outputs = []
    running = [
        subprocess.Popen(
            [sys.executable, str(root / words[1]), *words[2:], "--pushes", "300"],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for words in map(str.split, block.strip().splitlines())
    ]
    for process in running:
        outputs.append(process.communicate(timeout=100)[0])
        assert process.returncode == 0, outputs
    found = re.search(r"accuracy ([\d.]+) % after 30\d pushes", outputs[0])
    assert found, outputs
    assert float(found[1]) > 60
    assert all("MiB" in output for output in outputs[1:])
    assert len(outputs) == 3
    assert (tmp_path / "runs/embeddings/model.pt").exists()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\5\0\0\0hello"])
def test_another_service_at_the_port_of_a_server_is_no_server(
    answer: bytes, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve() -> None:
            while True:
                try:
                    peer, _ = other.accept()
                except OSError:
                    return  # the test has ended
                with peer:
                    peer.sendall(answer)
                    peer.recv(1 << 16)

        threading.Thread(target=serve, daemon=True).start()
        file = tmp_path / "server.json"
        port = other.getsockname()[1]
        file.write_text(json.dumps({"host": "127.0.0.1", "port": port, "key": "x"}))
        with pytest.raises(paceline.CollectiveTimeout, match="no parameter server answered"):
            paceline.connect_server(str(file), timeout_s=1.0)
        other.shutdown(socket.SHUT_RDWR)
