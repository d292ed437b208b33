"""Provoke the messages that one process can, each under its heading; run by test_explain.py."""

from __future__ import annotations

import datetime
import io
import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn, serialization
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

SHORT = datetime.timedelta(seconds=1)
ALONE = {"rank": 0, "world_size": 1}


class Unsafe:
    """What weights_only refuses."""


class Dies(Dataset[torch.Tensor]):
    """Its worker dies as it is told."""

    def __init__(self, signal: int | None) -> None:
        self.signal = signal

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        os._exit(1) if self.signal is None else os.kill(os.getpid(), self.signal)
        return torch.ones(1)


class Reentrant(nn.Module):
    """A layer that two reentrant checkpoints share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        parts = [checkpoint(self.layer, x, use_reentrant=True) for _ in range(2)]
        return parts[0] + parts[1]


class Unused(nn.Module):
    """A layer that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def alone(backend: str = "gloo") -> None:
    """A group of this process."""
    dist.init_process_group(backend, store=dist.HashStore(), **ALONE)


def taken_by_torch() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dist.TCPStore("127.0.0.1", listener.getsockname()[1], 1, True, SHORT)


def taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as other:
        other.bind(listener.getsockname())


def refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    dist.TCPStore("127.0.0.1", port, 1, False, SHORT)


def _meeting(nodes: int, **more: str) -> RendezvousHandler:
    """A node of an elastic job; with `is_host="0"` nobody serves its rendezvous."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
    words = {"is_host": "1", "read_timeout": "1", "join_timeout": "1"} | more
    parameters = RendezvousParameters("c10d", endpoint, "job", nodes, nodes, None, **words)
    return get_rendezvous_handler(parameters)


def closed() -> None:
    node = _meeting(1)
    node.set_closed()
    node.next_rendezvous()


def never_came() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 2, True, SHORT, False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=SHORT)


def reentrant() -> None:
    model = DistributedDataParallel(Reentrant(), find_unused_parameters=True)
    model(torch.ones(1, 2)).sum().backward()


def unused() -> None:
    model = DistributedDataParallel(Unused())
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


def inplace() -> None:
    y = torch.ones(2, requires_grad=True).exp()
    y.add_(1).sum().backward()


def anomaly() -> None:
    with torch.autograd.set_detect_anomaly(True):
        (torch.sqrt(torch.zeros(1, requires_grad=True)) * 0).sum().backward()


def clip() -> None:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.tensor([float("nan")])
    nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)


def forked() -> None:
    torch.cuda._is_in_bad_fork = lambda: True
    torch.cuda.init()


def saved(thing: object, length: int | None = None) -> io.BytesIO:
    """What torch.save writes of it, or the beginning of that."""
    file = io.BytesIO()
    torch.save(thing, file)
    return io.BytesIO(file.getvalue()[:length])


def saved_on_a_gpu() -> None:
    tag, serialization.location_tag = serialization.location_tag, lambda storage: "cuda:0"
    file = saved(torch.ones(1))
    serialization.location_tag = tag
    torch.load(file)


def prefixed() -> None:
    layer = nn.Linear(2, 2)
    layer.load_state_dict({f"module.{name}": value for name, value in layer.state_dict().items()})


def cuda_group() -> None:
    dist.destroy_process_group()
    alone("cuda:gloo")
    dist.all_reduce(torch.ones(1))


ONE_PROCESS: list[tuple[str, Callable[[], object]]] = [
    ("address-in-use", taken_by_torch),
    ("address-in-use", taken),
    ("rendezvous-unreachable", refused),
    ("host-unknown", lambda: socket.create_connection(("no-such-host.invalid", 1))),
    ("rendezvous-unreachable", lambda: dist.TCPStore("no-such-host.invalid", 1, 1, False, SHORT)),
    ("ranks-missing", lambda: dist.TCPStore("127.0.0.1", 0, 2, True, SHORT)),
    ("rendezvous-unreachable", lambda: _meeting(1, is_host="0")),
    ("ranks-missing", lambda: _meeting(2).next_rendezvous()),
    ("ranks-missing", closed),
    ("store-timeout", never_came),
    ("host-out-of-memory", lambda: torch.empty(1 << 60)),
    ("host-out-of-memory", lambda: bytearray(1 << 60)),
    ("loader-worker-killed", lambda: list(DataLoader(Dies(9), num_workers=1))),
    ("shared-memory", lambda: list(DataLoader(Dies(7), num_workers=1))),
    ("loader-worker-exited", lambda: list(DataLoader(Dies(None), num_workers=1))),
    ("loader-worker-signalled", lambda: list(DataLoader(Dies(15), num_workers=1))),
    ("no-launcher", lambda: dist.init_process_group("gloo")),
    ("cuda-missing", lambda: alone("nccl")),
    ("cuda-missing", lambda: torch.ones(1, device="cuda")),
    ("cuda-in-fork", forked),
    ("cuda-no-such-device", saved_on_a_gpu),
    ("no-process-group", dist.barrier),
    ("weights-only", lambda: torch.load(saved(Unsafe()))),
    ("checkpoint-damaged", lambda: torch.load(saved(torch.ones(1000), 2000))),
    ("checkpoint-damaged", lambda: torch.load(io.BytesIO(b"version 1"), weights_only=False)),
    ("disk-full", lambda: torch.save(torch.ones(1 << 20), "/dev/full")),
    ("disk-full", lambda: Path("/dev/full").write_text("x")),
    ("state-dict-module", prefixed),
    ("inplace", inplace),
    ("nan", anomaly),
    ("nan", clip),
    ("", alone),
    ("group-twice", alone),
    ("ddp-ready-twice", reentrant),
    ("ddp-unused-parameters", unused),
    ("sync-batchnorm-on-cpu", lambda: nn.SyncBatchNorm(2)(torch.ones(2, 2))),
    ("sync-batchnorm-on-cpu", lambda: DistributedDataParallel(nn.SyncBatchNorm(2))),
    ("no-backend-for-device", cuda_group),
]


def main() -> None:
    """Print a heading and what comes of each."""
    for number, (_, provoke) in enumerate(ONE_PROCESS):
        print(f"=== {number}", file=sys.stderr, flush=True)
        try:
            provoke()
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
