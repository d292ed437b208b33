"""Make one trace of those of all ranks, and a summary of it. Pure, but for reading the files.

The trace is in the format of Chrome and Perfetto: a list of events with `ts` and `dur` in microseconds.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

_COLLECTIVE = re.compile(r"(gloo|nccl|shm|mpi)[:_].*|nccl(Dev)?Kernel.*|ncclDevKernel.*")
_COMPUTE = ("cpu_op", "kernel")
_LISTED = 10
Event = dict[str, Any]
Spans = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """What one rank recorded.

    Args:
        steps: Number of steps.
        events: Complete events of the trace; `ts` and `dur` in microseconds since the epoch.
        names: Events that name processes and threads.
        totals: By operation: seconds on the host and on the GPU, without those of the operations that it
            calls, and the number of calls.
    """

    rank: int
    steps: int
    events: list[Event]
    names: list[Event]
    totals: dict[str, tuple[float, float, int]]


def read_profiles(folder: Path) -> list[RankProfile]:
    """The profiles of all ranks that wrote one, in rank order.

    Raises:
        ConfigError: no rank did.
    """
    found = []
    for path in sorted(folder.glob("facts-*.json"), key=lambda p: int(p.stem.split("-")[1])):
        facts = json.loads(path.read_text())
        trace = json.loads((folder / f"trace-{facts['rank']}.json").read_text())
        base_us = trace.get("baseTimeNanoseconds", 0) / 1e3
        events = [e | {"ts": e["ts"] + base_us} for e in trace["traceEvents"] if "ts" in e]
        found.append(
            RankProfile(
                rank=facts["rank"],
                steps=facts["steps"],
                events=[e for e in events if e.get("ph") == "X"],
                names=[e for e in events if e.get("ph") == "M"],
                totals={name: tuple(numbers) for name, *numbers in facts["totals"]},
            )
        )
    if not found:
        raise ConfigError(
            "no step was recorded.",
            why="the script has ended, or failed, before the first step to record.",
            fix="choose a smaller --skip, or train for more steps.",
        )
    return found


def merge(ranks: Sequence[RankProfile]) -> dict[str, Any]:
    """One trace: a process for each rank, with its name. All ranks are on one host, so they share a clock."""
    begin = min(e["ts"] for each in ranks for e in each.events)
    events: list[Event] = []
    for each in ranks:
        name = f"rank {each.rank}"
        events.append({"ph": "M", "name": "process_name", "pid": each.rank, "args": {"name": name}})
        sort = {"sort_index": each.rank}
        events.append({"ph": "M", "name": "process_sort_index", "pid": each.rank, "args": sort})
        events += [e | {"pid": each.rank} for e in each.names if e["name"] == "thread_name"]
        events += [e | {"pid": each.rank, "ts": e["ts"] - begin} for e in each.events]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(trace: dict[str, Any], path: Path) -> None:
    """Write the trace; compressed if the name ends with .gz."""
    data = json.dumps(trace, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(data, 6) if path.suffix == ".gz" else data)


def summary(ranks: Sequence[RankProfile]) -> list[str]:
    """The costliest operations, and how much of the communication is hidden, as lines of text."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for each in ranks:
        for name, numbers in each.totals.items():
            for column, number in enumerate(numbers):
                totals[name][column] += number / each.steps / len(ranks)
    on_gpu = any(gpu_s for _, gpu_s, _ in totals.values())
    costly = sorted(totals.items(), key=lambda item: -item[1][1 if on_gpu else 0])[:_LISTED]
    where = " on the GPU" if on_gpu else ""
    lines = [
        f"{ranks[0].steps} steps on {len(ranks)} ranks. The {len(costly)} costliest operations{where}, each "
        "without those that it calls, mean over ranks:",
        f"{'ms of a step':>14}{'calls':>9}  operation",
    ]
    if on_gpu:
        lines[-1] = f"{'ms of a step':>14}{'on the host':>13}{'calls':>9}  operation"
    for name, (host_s, gpu_s, calls) in costly:
        times = f"{1e3 * gpu_s:>14.3f}{1e3 * host_s:>13.3f}" if on_gpu else f"{1e3 * host_s:>14.3f}"
        lines.append(f"{times}{calls:>9.1f}  {name}")
    lines += ["", f"{'rank':>6}{'step ms':>10}{'computing':>11}{'communicating':>15}{'hidden':>8}"]
    for each in ranks:
        step_s, busy_s, communication_s, hidden = overlap(each)
        hidden_text = "-" if hidden is None else f"{100 * hidden:.0f} %"
        lines.append(
            f"{each.rank:>6}{1e3 * step_s:>10.2f}{1e3 * busy_s:>11.2f}{1e3 * communication_s:>15.2f}"
            f"{hidden_text:>8}"
        )
    lines.append("hidden: the share of the communication during which the rank also computes.")
    return lines


def overlap(profile: RankProfile) -> tuple[float, float, float, float | None]:
    """Seconds of a step, of computing and of communicating in it, and the hidden share of the latter."""
    communicating = _union(e for e in profile.events if _COLLECTIVE.fullmatch(e["name"]))
    computing = _union(
        e
        for e in profile.events
        if e.get("cat") in _COMPUTE
        and not _COLLECTIVE.fullmatch(e["name"])
        and not e["name"].startswith("c10d::")
    )
    whole = [(e["ts"], e["ts"] + e["dur"]) for e in profile.events]
    span_us = max(end for _, end in whole) - min(begin for begin, _ in whole)
    both_us = (
        _length(communicating) + _length(computing) - _length(_merged(communicating + computing))
    )
    communication_us = _length(communicating)
    per_step = 1e6 * profile.steps
    hidden = both_us / communication_us if communication_us else None
    return span_us / per_step, _length(computing) / per_step, communication_us / per_step, hidden


def _union(events: Iterable[Event]) -> Spans:
    return _merged([(e["ts"], e["ts"] + e["dur"]) for e in events])


def _merged(spans: Spans) -> Spans:
    """The same times, without overlaps."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)
