"""Exchange of JSON values between ranks through a torch `Store`, where there is no process group to use."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist


def post(store: dist.Store, name: str, value: Any, rank: int, world_size: int) -> list[str]:
    """Write this rank's value under a name that is used once; the keys of all ranks, in rank order."""
    keys = [f"{name}/{each}" for each in range(world_size)]
    store.set(keys[rank], json.dumps(value))
    return keys


def read(store: dist.Store, keys: list[str]) -> list[Any]:
    """The values under these keys; waits, up to the timeout of the store, until all are written."""
    return [json.loads(text) for text in store.multi_get(keys)]


def gather(store: dist.Store, name: str, value: Any, rank: int, world_size: int) -> list[Any]:
    """The values of all ranks, in rank order. All ranks must call it; two calls of the store for each."""
    return read(store, post(store, name, value, rank, world_size))
