"""Communication that the steps wait for: larger buckets, compression, and accumulation of gradients.

An all-reduce of n buckets with b bytes in total takes n * latency + b / bandwidth. Both are measured when the
run begins (`run["link"]`). Bucket i of n is sent at i/n of the backward. So the part that the steps wait for
is the larger of two: the n transfers less the backward after the first bucket, and the last transfer. A wait
of all ranks that the link does not explain is a wait for each other in turn, and does not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from paceline.clock.evidence import Evidence, is_long
from paceline.clock.finding import Finding, duration

_MIB = 2**20
_BUCKETS_MIB = (1, 2, 5, 10, 25, 50, 100, 200)  # sizes that are compared
_ACCUMULATION = 4  # micro-batches; a much larger batch needs another learning rate
_LINK_FACTOR = 1.5  # communication may take this much longer than the link explains


@dataclass(frozen=True, kw_only=True)
class _AllReduce:
    """The all-reduce of the gradients of a step.

    Args:
        total_bytes: Of all gradients.
        bucket_bytes: Of one bucket.
        latency_s: Of the transfer of one bucket.
        bytes_per_s: The bandwidth.
    """

    total_bytes: int
    bucket_bytes: int
    latency_s: float
    bytes_per_s: float

    @property
    def num_buckets(self) -> int:
        return math.ceil(self.total_bytes / self.bucket_bytes)

    @property
    def transfer_s(self) -> float:
        """The time of all buckets."""
        return self.num_buckets * self.latency_s + self.total_bytes / self.bytes_per_s

    def exposed_s(self, bucket_bytes: int, backward_s: float) -> float:
        """What a step waits for with buckets of another size."""
        num_buckets = math.ceil(self.total_bytes / bucket_bytes)
        one_s = self.latency_s + self.total_bytes / num_buckets / self.bytes_per_s
        return max(num_buckets * one_s - backward_s * (1 - 1 / num_buckets), one_s)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Three changes, each on its own, for models of `paceline.ddp` without a mesh."""
    all_reduce = _read(evidence.run)
    if all_reduce is None:
        return
    step_s = evidence.step_s
    exposed_s = min(evidence.exposed_s, _LINK_FACTOR * all_reduce.transfer_s)
    if not is_long(exposed_s, step_s):
        return
    title = (
        f"communication-bound: each step of {duration(step_s)} waits {duration(exposed_s)} "
        "for communication"
    )
    yield from _buckets(evidence, all_reduce, exposed_s, title)
    yield from _compression(evidence, all_reduce, exposed_s, title)
    yield from _accumulation(evidence, exposed_s, title)


def _read(run: Mapping[str, Any]) -> _AllReduce | None:
    """The all-reduce of a run; None for other strategies, and if the run does not describe it."""
    link = run.get("link") or {}
    is_described = "gradient_bytes" in run and {"latency_s", "bytes_per_s"} <= link.keys()
    if not is_described or run.get("mesh") or run.get("strategy") not in ("DDP", "Packed"):
        return None
    total_bytes = run["gradient_bytes"]
    return _AllReduce(
        total_bytes=total_bytes,
        bucket_bytes=min(run.get("bucket_bytes") or total_bytes, total_bytes),
        latency_s=link["latency_s"],
        bytes_per_s=link["bytes_per_s"],
    )


def _buckets(
    evidence: Evidence, all_reduce: _AllReduce, exposed_s: float, title: str
) -> Iterator[Finding]:
    step_s, total_bytes = evidence.step_s, all_reduce.total_bytes
    backward_s = fmean(evidence.spent_s["backward"])
    times_s = {
        mib: all_reduce.exposed_s(min(mib * _MIB, total_bytes), backward_s)
        for mib in _BUCKETS_MIB
        if "bucket_bytes" in evidence.run and all_reduce.bucket_bytes < min(mib * _MIB, total_bytes)
    }
    best = min(times_s, key=lambda mib: times_s[mib], default=0)
    if not best or times_s[best] >= exposed_s:
        return
    size = f"{all_reduce.bucket_bytes / _MIB:.2g} MiB"
    yield Finding(
        kind="buckets",
        title=f"{title}, in {all_reduce.num_buckets} buckets of {size}",
        cure=f"ddp(..., bucket_mb={best})",
        gain=step_s / (step_s - exposed_s + times_s[best]),
        details=f"Latency {duration(all_reduce.latency_s)}, bandwidth {_mb_per_s(all_reduce)}, "
        "measured when the run began. On 3 and more ranks the last bits of a sum depend on the buckets.",
    )


def _compression(
    evidence: Evidence, all_reduce: _AllReduce, exposed_s: float, title: str
) -> Iterator[Finding]:
    step_s, total_bytes = evidence.step_s, all_reduce.total_bytes
    last_s = all_reduce.latency_s + all_reduce.bucket_bytes / 2 / all_reduce.bytes_per_s
    left_s = max(exposed_s - total_bytes / 2 / all_reduce.bytes_per_s, last_s)
    if evidence.run.get("compress") or left_s >= exposed_s:
        return
    yield Finding(
        kind="communication",
        title=title,
        cure='ddp(..., compress="bf16")',
        changes="gradients are rounded",
        gain=step_s / (step_s - exposed_s + left_s),
        details=f"It halves the {total_bytes / 1e6:.3g} MB of each step, at {_mb_per_s(all_reduce)}. "
        "Gradients lose 16 of 24 bits of their mantissa before they are summed.",
    )


def _accumulation(evidence: Evidence, exposed_s: float, title: str) -> Iterator[Finding]:
    """k micro-batches in a step communicate once, and update the weights once."""
    run, step_s, k = evidence.run, evidence.step_s, _ACCUMULATION
    if not {"global_batch", "data_ranks", "micro_batch"} <= run.keys():
        return
    # The samples of one forward of a rank, which `micro_batch` may not limit.
    forward_size = min(run["micro_batch"], math.ceil(run["global_batch"] / run["data_ranks"]))
    per_update_s = exposed_s + fmean(evidence.spent_s["optimizer"])
    yield Finding(
        kind="accumulation",
        title=title,
        cure=f"Batches(..., global_batch={k * run['global_batch']}, micro_batch={forward_size})",
        changes="a larger batch, which is another training",
        gain=k * step_s / (k * (step_s - per_update_s) + per_update_s),
        details=f"The ranks communicate once for {k} times as many samples. An epoch has fewer updates of "
        "the weights, so the learning rate has to be chosen again.",
    )


def _mb_per_s(all_reduce: _AllReduce) -> str:
    return f"{all_reduce.bytes_per_s / 1e6:.3g} MB/s"
