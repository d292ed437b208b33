"""Ray Train: a worker of its `TorchTrainer` has a process group before the training function is called.

The job takes over the store of that group, which no other job uses, and replaces the group by its own. Ray
sets the variables of torchrun, so a worker is a rank like any other. ray is never imported here.
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from paceline import torch_private

_DEFAULT_STORE = "torch.distributed.distributed_c10d._get_default_store"

# Kept until the process ends, for a second join: rank 0 serves the store, and if it served another one at the
# same address, a faster rank would connect to the old one.
_store: dist.Store | None = None


def take_store() -> dist.Store | None:
    """Destroy the process group that Ray Train has made in this process, and return its store.

    Returns:
        The same store at the next join. None if this process is no worker of Ray Train, or had no process
        group.

    Collective: all ranks.
    """
    global _store
    train = sys.modules.get("ray.train")
    if train is None or not dist.is_initialized():
        return _store
    try:
        size = train.get_context().get_world_size()
    except Exception:  # not called from a worker; the error depends on the version of Ray
        return None
    get_store = torch_private.find(_DEFAULT_STORE)
    if get_store is None or size != dist.get_world_size():
        return None
    _store = get_store()
    dist.destroy_process_group()
    return _store
