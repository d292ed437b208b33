"""Reads what W&B keeps of a run on the disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path


def read_wandb(folder: Path, kind: str = "offline-run") -> list[dict[str, float]]:
    """The values of each step of the only run in a folder: an "offline-run", or a "run" with a server."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob(f"wandb/{kind}-*/run-*.wandb")
    rows = []
    for data in _leveldb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {i.key or i.nested_key[0]: json.loads(i.value_json) for i in items}
            rows.append({("step" if k == "_step" else k): v for k, v in row.items()})
    return rows


def _leveldb_records(log: bytes) -> Iterator[bytes]:
    """The records of a log of LevelDB, behind the 7 bytes with which wandb begins it."""
    block, at, record = 1 << 15, 7, b""
    while at + 7 <= len(log):
        if (left := block - at % block) < 7:
            at += left
            continue
        end = at + 7 + int.from_bytes(log[at + 4 : at + 6], "little")
        record += log[at + 7 : end]
        if log[at + 6] in (1, 4):  # whole, or the last part
            yield record
            record = b""
        at = end
