"""How long a step takes on more nodes: its parts on one node, and the cost of communication. Pure.

The cost of a message of n bytes between two hosts is alpha + n / beta: latency and bandwidth of the link
(Hockney, 1994). Collectives are rings, as in Gloo and NCCL for large tensors:

- Thakur, Rabenseifner, Gropp: "Optimization of Collective Communication Operations in MPICH", 2005.
- Patarasuk, Yuan: "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009: a ring over
  all ranks of several hosts uses each link between hosts once in each direction.
- Li et al.: "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020: DDP sums a
  bucket while the backward computes the next one. What is left at the end of the backward is exposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

_LINK_LEAST = 0.9  # of the link: the slow end of the band


@dataclass(frozen=True)
class Link:
    """The link of each host to the others.

    Args:
        bytes_per_s: Payload in one direction.
        latency_s: Of a message.
        fp16_bytes_per_s: With casts from fp32 and back; 0 if unknown, then as `bytes_per_s`.
    """

    bytes_per_s: float
    latency_s: float
    fp16_bytes_per_s: float = 0.0

    def half_ring_s(self, nodes: int, ranks: int, size_bytes: float) -> float:
        """A ring reduce-scatter or all-gather of p ranks: a link of a node carries (p - 1) / p of it."""
        return (nodes - 1) * self.latency_s + (ranks - 1) / ranks * size_bytes / self.bytes_per_s

    def all_reduce_s(self, nodes: int, ranks: int, size_bytes: float) -> float:
        """A ring all-reduce: a reduce-scatter, then an all-gather."""
        return 2 * self.half_ring_s(nodes, ranks, size_bytes)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A step of a run, without the time that it waits for communication.

    Args:
        nodes, ranks_per_node: Of the run.
        device: "cpu", "cuda" or "xpu".
        layout: "DDP" or "FSDP".
        global_batch: Samples of a step, over all ranks.
        micro_batches: In a step, on each rank.
        data_s, forward_s, backward_s: Parts of the step, for all its micro-batches.
        other_s: The optimizer and the rest of the loop.
        communication_s: Exposed communication in a step of the run, beside these parts.
        spread: The step without communication in the middle half of the windows, by its median.
        parameters: Number of trained parameters.
        buckets: Bytes of DDP's gradient buckets, in the order of the backward.
        blocks: Of FSDP, in the order of the forward: the bytes that are gathered, and those of the gradients.
        powersgd_bytes: What PowerSGD of rank 2 sends in a step.
        compress: As given to `ddp`; empty without.
        memory_bytes: After a step; the largest of all ranks.
        state_bytes: Weights, gradients and optimizer state of the whole model; None if unknown.
    """

    nodes: int
    ranks_per_node: int
    device: str
    layout: str
    global_batch: int
    micro_batches: int
    data_s: float
    forward_s: float
    backward_s: float
    other_s: float
    communication_s: float
    spread: tuple[float, float]
    parameters: int
    buckets: Sequence[float]
    blocks: Sequence[tuple[float, float]]
    powersgd_bytes: float
    compress: str
    memory_bytes: float
    state_bytes: float | None

    @property
    def step_s(self) -> float:
        """A step of the run."""
        return self.forward_s + self.backward_s + self.other_s + self.data_s + self.communication_s


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train."""

    kind: str  # "DDP", "fp16", "PowerSGD", "DiLoCo", "FSDP" or "HSDP"
    every: int = 1  # steps from one sum of DiLoCo to the next
    accumulate: int = 1  # micro-batches of the run's size, for one of the run


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a way gives on some nodes.

    Args:
        step_s, band_s: Of one step, and its range; see `estimate`.
        exposed_s: Of the step: communication that no computation hides.
        samples_per_s: Over all ranks.
        efficiency: `samples_per_s` by that of as many single nodes.
        limit: "computation", "data", "bandwidth", "latency", or "samples" if there are fewer than ranks.
        memory_bytes: Of a rank, with its gradients; None if unknown.
    """

    nodes: int
    ranks: int
    step_s: float
    band_s: tuple[float, float]
    exposed_s: float
    samples_per_s: float
    efficiency: float
    limit: str
    memory_bytes: float | None


def ways(run: Measured, *, weak: bool) -> dict[str, Way]:
    """The run's own way, then those that it could take, by name."""
    own = run.layout
    if run.compress:
        own = "PowerSGD" if run.compress.startswith("PowerSGD") else "fp16"
    others = {
        "DDP": Way(kind="DDP"),
        'compress="fp16"': Way(kind="fp16"),
        "PowerSGD, rank 2": Way(kind="PowerSGD"),
        "DiLoCo, H=50": Way(kind="DiLoCo", every=50),
        "DiLoCo, H=500": Way(kind="DiLoCo", every=500),
        "FSDP": Way(kind="FSDP"),
    }
    if run.ranks_per_node > 1:
        others["HSDP"] = Way(kind="HSDP")
    if weak:  # with the same global batch it changes nothing
        others["accumulation x4"] = Way(kind=own, accumulate=4)
    own_way = Way(kind=own)
    return {"as it is": own_way} | {name: way for name, way in others.items() if way != own_way}


def estimate(run: Measured, link: Link, way: Way, nodes: int, *, weak: bool) -> Estimate:
    """The time of a step.

    Forward, backward and data take as long as the samples of the rank that has most; the optimizer and the
    rest of the loop take as long as in the run. The band reaches from the fast quarter of the run's windows
    to the slow one. At its slow end nothing overlaps, on a link of 0.9 of its speed.

    Args:
        weak: Each rank keeps its samples. False: the global batch stays the same.
    """
    ranks, run_ranks = nodes * run.ranks_per_node, run.nodes * run.ranks_per_node
    samples = run.global_batch * way.accumulate * (ranks / run_ranks if weak else 1)
    of_run = -(-run.global_batch // run_ranks)
    of_rank = -(-run.global_batch * way.accumulate // (run_ranks if weak else ranks))
    share = of_rank / of_run
    # Micro-batches keep their size while a rank has as many samples as one of them.
    micros = -(-run.micro_batches * of_rank // of_run)
    computed_s = share * (run.forward_s + run.backward_s) + run.other_s
    alone_s = computed_s + share * run.data_s
    of_nodes = partial(_exposed_s, run, way, nodes, micros)
    exposed_s, most_s = of_nodes(link, share), of_nodes(link, 0.0)
    latency_s = most_s - of_nodes(replace(link, latency_s=0.0), 0.0)
    # Inside a node: as in the run. It overlaps with the links, but for DiLoCo's sums, which come after it.
    inside_s = run.communication_s if run.nodes == 1 else 0.0
    both = sum if way.kind == "DiLoCo" else max
    exposed_s, most_s = both((inside_s, exposed_s)), both((inside_s, most_s))
    parts = {
        "computation": computed_s,
        "data": share * run.data_s,
        "latency" if latency_s > most_s / 2 else "bandwidth": exposed_s,
    }
    low, high = run.spread
    rate = samples / (alone_s + exposed_s)
    of_one = rate if nodes == 1 else estimate(run, link, way, 1, weak=weak).samples_per_s
    return Estimate(
        nodes=nodes,
        ranks=ranks,
        step_s=alone_s + exposed_s,
        band_s=(low * alone_s + exposed_s, high * alone_s + most_s / _LINK_LEAST),
        exposed_s=exposed_s,
        samples_per_s=rate,
        efficiency=rate / nodes / of_one,
        limit="samples" if samples < ranks else max(parts, key=lambda name: parts[name]),
        memory_bytes=_memory_bytes(run, way, nodes),
    )


def _exposed_s(run: Measured, way: Way, nodes: int, micros: int, link: Link, hides: float) -> float:
    """Communication between nodes that is left.

    Args:
        micros: Micro-batches of a rank.
        hides: The part of the run's forward and backward that communication may overlap with.
    """
    if nodes == 1:
        return 0.0
    forward_s, backward_s = hides * run.forward_s / micros, hides * run.backward_s / micros
    ranks, total = nodes * run.ranks_per_node, sum(run.buckets)
    on_cpu = run.device == "cpu"
    if way.kind == "DiLoCo":  # one sum over the nodes, of differences of the weights in fp32
        return link.all_reduce_s(nodes, nodes, 4 * run.parameters) / way.every
    if way.kind == "FSDP":  # each micro-batch gathers twice, and the last one sums
        sizes, _ = blocks = tuple(zip(*reversed(run.blocks), strict=True))
        gathers, sums = ([link.half_ring_s(nodes, ranks, n) for n in part] for part in blocks)
        if on_cpu:  # FSDP2 waits for each collective of Gloo, whose reduce-scatter is an all-reduce
            return 2 * micros * sum(gathers) + 2 * sum(sums)
        both = [gather_s + sum_s for gather_s, sum_s in zip(gathers, sums, strict=True)]
        before_s = micros * max(0.0, sum(gathers) - forward_s)
        again_s = (micros - 1) * _left_s(sizes, gathers, backward_s)
        return before_s + again_s + _left_s(sizes, both, backward_s)
    messages, part = 1, 1.0
    if way.kind == "PowerSGD":  # per bucket: the vectors, P and Q
        messages, part = 3, run.powersgd_bytes / total / 3
    if way.kind == "fp16":
        part = min(1.0, 2 * run.parameters / total)
        link = replace(link, bytes_per_s=link.fp16_bytes_per_s or link.bytes_per_s)
    # With HSDP each rank of a node sums its part over the nodes.
    ring = nodes if way.kind == "HSDP" else ranks
    sums = [messages * link.all_reduce_s(nodes, ring, part * size) for size in run.buckets]
    waits = on_cpu and way.kind in ("HSDP", "PowerSGD")
    return _left_s(run.buckets, sums, 0.0 if waits else backward_s)


def _left_s(buckets: Sequence[float], costs_s: Sequence[float], backward_s: float) -> float:
    """What is left of the sums of buckets at the end of the backward, which takes as long for each byte.

    A bucket is summed when its gradients are ready and the bucket before is summed.
    """
    total, ready, end_s = sum(buckets), 0.0, 0.0
    for size, cost_s in zip(buckets, costs_s, strict=True):
        ready += size
        end_s = max(end_s, backward_s * ready / total) + cost_s
    return max(0.0, end_s - backward_s)


def _memory_bytes(run: Measured, way: Way, nodes: int) -> float | None:
    """The memory of a rank: as in the run, but with another part of the state, and with gradients."""
    grads, run_ranks = sum(run.buckets), run.nodes * run.ranks_per_node
    ranks = {"FSDP": nodes * run.ranks_per_node, "HSDP": run.ranks_per_node}.get(way.kind, 1)
    now = run_ranks if run.layout == "FSDP" else 1
    if run.state_bytes is None and ranks != now:
        return None
    state = run.state_bytes or 0.0
    # After a step only the buckets of DDP are left of the gradients.
    held = state - (0.0 if run.layout == "DDP" and run_ranks > 1 else grads)
    outer = 8 * run.parameters if way.kind == "DiLoCo" and run.device == "cpu" else 0
    return max(0.0, run.memory_bytes - held / now) + state / ranks + outer
