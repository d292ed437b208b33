"""Read what `paceline plan` needs: the step of a run from its clock.jsonl, and a link."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.clock.record import FILE, Record
from paceline.errors import ConfigError
from paceline.plan.model import Link, Measured

_PAYLOAD = 1448 / 1514  # of a link's bits: TCP in an Ethernet frame
_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_LATENCY_S = 50e-6  # if it is not given
_LEAST_WINDOWS = 3  # without the first, which has the warm-up
_SIZES = ("global_batch", "parameters", "buckets", "blocks", "powersgd_bytes")
_KEYS = ("device", "strategy", "world_size", "data_ranks", "local_world_size", *_SIZES)


def read_step(name: str, record: Record) -> Measured:
    """A step of the newest start of a run: the median over its windows.

    Args:
        name: The folder, for errors.

    Raises:
        ConfigError: the run has too few steps, or its record does not tell what a step on more nodes costs.
    """
    run, where = record.run, f"{name}/{FILE}"
    windows = [window for window in record.windows if window.step > run.get("step", 0)][1:]
    windows = [window for window in windows if window.num_ranks == windows[-1].num_ranks]
    if len(windows) < _LEAST_WINDOWS:
        damaged = f"{record.skipped} lines have another format; " if record.skipped else ""
        raise ConfigError(
            f"{len(windows)} windows of the newest start can be used, and {_LEAST_WINDOWS} are needed.",
            where=where,
            why=f"{damaged}a window has the steps of about a second, and the first one has the warm-up.",
            fix="let the run make more steps.",
        )
    if why := _why_not(run):
        raise ConfigError(
            "this run does not tell how long its steps would take on other numbers of nodes.",
            where=where,
            why=why,
            fix="plan from a run of 10 s of this version on one host, with ddp, fsdp, or one process.",
        )
    ranks, ranks_per_node = int(run["world_size"]), int(run["local_world_size"])
    # Ranks wait for each other, so the step takes as long as on the rank that waits least.
    waits_s = np.median([w.spent_s["communication"] for w in windows], axis=0)
    slowest = int(np.argmin(waits_s))
    parts: dict[str, Any] = {
        f"{phase}_s": float(np.median([w.per_step(phase, slowest) for w in windows]))
        for phase in ("data", "forward", "backward")
    }
    left_out = ("checkpoint", "evaluation")
    alone = [
        w.step_s - w.exposed_s - sum(w.per_step(phase, slowest) for phase in left_out)
        for w in windows
    ]
    alone_s = float(np.median(alone))
    samples = -(-int(run["global_batch"]) // ranks)
    per_rank, besides = run["powersgd_bytes"]
    rank = re.search(r"rank=(\d+)", run.get("compress") or "")
    return Measured(
        nodes=ranks // ranks_per_node,
        ranks_per_node=ranks_per_node,
        device=run["device"],
        layout="FSDP" if run["strategy"] == "FSDP" else "DDP",
        global_batch=int(run["global_batch"]),
        micro_batches=-(-samples // int(run.get("micro_batch") or samples)),
        **parts,
        other_s=max(0.0, alone_s - sum(parts.values())),
        communication_s=float(np.median([w.exposed_s for w in windows])),
        spread=tuple(np.quantile(alone, (0.25, 0.75)) / alone_s),
        powersgd_bytes=(int(rank[1]) if rank else 2) * per_rank + besides,
        compress=run.get("compress") or "",
        memory_bytes=float(np.median([w.memory_bytes for w in windows], axis=0).max()),
        **{name: run[name] for name in ("parameters", "buckets", "blocks")},
        state_bytes=run.get("state_bytes"),
    )


def _why_not(run: Mapping[str, Any]) -> str:
    """Why the record does not tell what the communication over more nodes costs; empty if it does."""
    if missing := [key for key in _KEYS if run.get(key) in (None, 0, [])]:
        return f"it does not tell its {', '.join(missing)}: it is of another version, or trains on a stream."
    ranks, ranks_per_node = run["world_size"], run["local_world_size"]
    if run["strategy"] not in ("", "DDP", "FSDP"):
        return f"its strategy is {run['strategy']}; DDP, FSDP and one process can be planned."
    if run["data_ranks"] != ranks:
        return f"its model is split over ranks ({run.get('mesh')}); their messages are not known."
    if run["strategy"] == "FSDP" and ranks > ranks_per_node:
        return "it ran on several hosts with FSDP, whose waits count as forward and backward."
    return "its hosts have different numbers of ranks." if ranks % ranks_per_node else ""


def read_link(text: str, device: str = "cpu") -> Link:
    """A link: "10Gbit,50us", or a file of `paceline doctor --json` that was made on several hosts.

    Args:
        device: With "cuda", doctor's all-reduce over NCCL counts, else that over Gloo.

    Raises:
        ConfigError: it is neither, or its rate is 0.
    """
    if Path(text).is_file():
        return _measured_link(text, device)
    number = r"(\d+\.?\d*) ?([a-z]+)"
    match = re.fullmatch(f"{number}(?:/s)?(?:, ?{number})?", text.strip().lower())
    rate, unit, latency, unit_of_time = match.groups() if match else ("", "", "", "")
    if not rate:
        problem = "is neither a link nor a file"
    elif unit not in _BITS or (latency and unit_of_time not in _SECONDS):
        problem = "has an unknown unit"
    elif float(rate) == 0:
        problem = "has a rate of 0"
    else:
        latency_s = float(latency) * _SECONDS[unit_of_time] if latency else _LATENCY_S
        return Link(_PAYLOAD * float(rate) * _BITS[unit] / 8, latency_s)
    raise ConfigError(
        f"--link {text!r} {problem}.",
        fix=f'write it as in "10Gbit,50us": a rate in {", ".join(_BITS)} per second, and a latency in '
        f"{', '.join(_SECONDS)}; or name a file of `paceline doctor --json`.",
    )


def _measured_link(path: str, device: str) -> Link:
    """The link with which a ring all-reduce takes as long as doctor measured."""
    try:
        # The launcher begins each line with the rank.
        text = re.sub(r"^\[\d+\] ", "", Path(path).read_text(), flags=re.MULTILINE)
        facts = json.loads(text)["facts"]
        if not facts["links"]:
            raise ValueError("it was measured on one host")
        nodes = sum(each["local_rank"] == 0 for each in facts["ranks"])
        none = {"error": "it has no all-reduce on GPUs"}
        reduces = [each.get("gpu", none) if device == "cuda" else each for each in facts["reduce"]]
        if failed := [each["error"] for each in reduces if "error" in each]:
            raise ValueError(failed[0])
        slowest = max(reduces, key=lambda each: each["seconds"])
        ranks, size, part = (slowest[key] for key in ("world_size", "bytes", "part_bytes"))
        # A line through two sizes (Hockney): the latency has what each message costs under load.
        s_per_byte = (slowest["seconds"] - slowest["part_seconds"]) / (size - part)
        fixed_s = max(0.0, slowest["seconds"] - s_per_byte * size)
        fp16_s_per_byte = (slowest["fp16_seconds"] - fixed_s) / (size / 2)
        if min(s_per_byte, fp16_s_per_byte) <= 0:
            raise ValueError("an all-reduce took no longer than one of fewer bytes")
        # The inverse of `Link.all_reduce_s`.
        sent, latency_s = 2 * (ranks - 1) / ranks, fixed_s / 2 / (nodes - 1)
        return Link(sent / s_per_byte, latency_s, sent / fp16_s_per_byte)
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"--link {path!r} does not hold a link that `paceline doctor` measured.",
            why=f"{why}.",
            fix="on all hosts: paceline run --nnodes 2 ... -m paceline doctor --json > doctor.json.",
        ) from error
