"""Exchange of JSON values between ranks through a torch `Store`, where there is no process group to use."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist


def gather(store: dist.Store, name: str, value: Any, rank: int, world_size: int) -> list[Any]:
    """The values of all ranks, in rank order. All ranks must call it, under a name that is used once.

    Waits, up to the timeout of the store, until all are written; two calls of the store.
    """
    keys = [f"{name}/{each}" for each in range(world_size)]
    store.set(keys[rank], json.dumps(value))
    return [json.loads(text) for text in store.multi_get(keys)]
