"""Says what limits a run, what to change, and how much faster it would be: evidence in, findings out. Pure.

`judge` reads the record of the step clock. The launcher also watches scripts without such a clock: the times
at which ranks enter collectives tell how long each rank waits (watch/straggler.py), and samples of stacks how
much of the time goes to each phase (launch/step_profile.py). `find_late`, `judge_late` and `judge_shares`
decide for all of them.

The evidence of the clock is the seconds that each rank spends in each phase of a step: the median over
windows, so that a pause in one of them changes nothing. The first window has the warm-up and is left out.
Ranks wait for each other in each step, so a step takes equally long on all of them:

    step = own work of the slowest rank + communication that no overlap hides

- What *every* rank waits is communication. What a rank waits beyond the rank that waits least is waiting for
  a slower rank, and the rank that waits least is the slowest.
- A rank without loader workers takes d seconds to produce its batches. w workers take d/w, at the same time
  as the rest of the step; they measure d themselves. Only if they are busy nearly all the time are more of
  them of use. A step cannot take less than the CPU time that the ranks and workers of a host want,
  divided by its cores.
- Communication of n buckets and b bytes takes n * latency + b / bandwidth. Both are measured when the run
  begins (`run["link"]`). Bucket i of n is sent at i/n of the backward, so the part that is not hidden is the
  larger of n transfers less the backward after the first bucket, and the last transfer. What all ranks wait
  and the link does not explain is waiting for each other in turn, and not counted.
- k micro-batches in a step communicate once, and update the weights once.

Each cure is judged alone, and only told if it makes the steps at least 1.1 times as fast.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, median_low
from typing import Any

from paceline.clock.record import Record, Window
from paceline.clock.step_clock import PHASES, WAITS
from paceline.errors import name_ranks

LEAST_GAIN = 1.1  # smaller ones are within the noise of a shared machine
_LEAST_WAIT_S = 1e-3  # per step; less is scheduler noise
_LEAST_SHARE = 0.13  # of a step
_LEAST_FACTOR = 1.2  # of a rank's own time by that of the others
_LEAST_DATA_SHARE = 0.05  # of a step; what takes less is not judged
_LEAST_WINDOWS = 3
_MOST_ROWS = 20_000  # of ranks in windows; more take seconds to judge and tell nothing new
_MIB = 2**20
_BUCKETS_MIB = (1, 2, 5, 10, 25, 50, 100, 200)
_MOST_ACCUMULATION = 4  # micro-batches; a much larger batch needs another learning rate
# Workers are enough if they produce a batch in this share of the rest of a step.
_HIDDEN_SHARE = 0.8
_MOST_WORKERS = 16
# Of the time of workers; if they have more time left, they are not what a rank waits for.
_BUSY_SHARE = 0.8
_LARGE_DATA_SHARE = 0.3  # of a step; then it is told also if the host has no free cores
_USABLE_SHARE = 0.9  # of the time of the cores; workers have costs of their own
_LINK_FACTOR = 1.5  # communication may take so much longer than the link explains
# By phase: what to do, and the share of the time that it then takes, or of what it takes now.
STALLS = {
    "checkpoint": ('Checkpoints(..., every_s="auto")', 0.035, "the time"),
    "evaluation": ("evaluate half as often", 0.5, "what it takes now"),
    "logging": ("training.log(..., every_n=) in a tenth of the steps", 0.1, "what it takes now"),
}
_CHECK_SHARE = (
    "check whether it has larger or more samples than the others, or a larger part of the model"
)
# What to do about a phase, of the clock or of a profile of stacks, that takes long on one rank or on all.
CURES = {
    "data": "load its samples in worker processes (num_workers), or make them cheaper",
    "copy": "check the connection between its host and its device",
    "forward": _CHECK_SHARE,
    "backward": _CHECK_SHARE,
    "optimizer": "check whether it updates more parameters than the others, or does more here",
    "garbage collection": "call gc.freeze() after setup; or gc.disable(), and gc.collect() on all ranks in "
    "the same step",
    "checkpoint": "save less often, in the background, or on all ranks together (paceline.Checkpoints)",
    "evaluation": "evaluate on all ranks together (paceline.evaluate)",
    "logging": "log less often, or in another thread",
    "the script": "do that work on all ranks, less often, or in another thread or process",
}
CURES["other"] = CURES["the script"]
# Phases that take no time of a step if other processes or threads do their work: the cure helps all ranks.
_MOVABLE = ("data", "checkpoint", "garbage collection")
JUDGED = "data, slow ranks, communication, checkpoints, evaluation and logging"
_COLLATE_SHARE = 0.5  # of the loading in the collate function, so that it is named


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What limits a run, and what to change.

    Args:
        kind: "data", "collate", "communication", "buckets", "accumulation", "straggler", "checkpoint",
            "evaluation", "logging" or "garbage collection".
        title: What was measured: "input-bound: 63 % of the step waits for data on all ranks".
        cure: What to change: "Batches(..., workers=4)".
        gain: Expected factor of the rate: 1.9 means 1.9 times as many samples per second.
        changes: What the cure changes in the training; empty if it trains the same.
        details: How the gain was computed, and what else the cure changes; sentences.
    """

    kind: str
    title: str
    cure: str
    gain: float
    changes: str = ""
    details: str = ""

    def __str__(self) -> str:
        gain = f"{self.gain:.0f}" if self.gain >= 10 else f"{self.gain:.2g}"
        changes = f" ({self.changes})" if self.changes else ""
        return f"{self.title}: {self.cure}, expected {gain}x{changes}"


@dataclass(frozen=True)
class Evidence:
    """A record, reduced to one step.

    Args:
        spent_s: By phase, the seconds of each rank in one step.
        cpu_s: By rank, seconds of one step in which it used a core, or waited for one, with its loader
            workers; empty if unknown.
        collate_s: By rank, seconds in the collate function; empty if unknown.
        load_s: By rank, seconds of its loader workers for its batches; empty if unknown.
        run: What describes the run; see `Record.run`.
    """

    spent_s: Mapping[str, Sequence[float]]
    cpu_s: Sequence[float]
    collate_s: Sequence[float]
    load_s: Sequence[float]
    run: Mapping[str, Any]

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(len(self.spent_s["data"]))

    @property
    def step_s(self) -> float:
        """Length of a step."""
        return fmean(sum(spent[r] for spent in self.spent_s.values()) for r in self.ranks)

    @property
    def exposed_s(self) -> float:
        """Communication that every rank waits for."""
        return min(self.spent_s["communication"])

    def own_s(self, rank: int, without: Collection[str] = ()) -> float:
        """What a rank does itself in a step, except in these phases."""
        left_out = {*without, *WAITS}
        return sum(spent[rank] for phase, spent in self.spent_s.items() if phase not in left_out)


def judge(record: Record) -> list[Finding] | None:
    """What limits a run, the best gain first; None if its newest start was too short to tell."""
    windows = _judged(record)
    if not windows:
        return None
    evidence = reduce(windows, record.run)
    found = [
        *_straggler(windows, evidence),
        *_loading(evidence),
        *_communication(evidence),
        *_stalls(windows, record.run),
    ]
    return sorted((f for f in found if f.gain >= LEAST_GAIN), key=lambda f: -f.gain)


def _judged(record: Record) -> list[Window]:
    """The windows of the newest start, without its first."""
    began = record.run.get("step", 0)
    windows = [window for window in record.windows if window.step > began][1:]
    if len(windows) < _LEAST_WINDOWS:
        return []
    ranks = windows[-1].num_ranks
    windows = [window for window in windows if window.num_ranks == ranks]
    return windows[:: math.ceil(len(windows) * ranks / _MOST_ROWS)]


def reduce(windows: Sequence[Window], run: Mapping[str, Any]) -> Evidence:
    """The medians of some windows with the same number of ranks."""
    ranks = range(windows[0].num_ranks)
    spent_s = {
        phase: [median(w.per_step(phase, rank) for w in windows) for rank in ranks]
        for phase in PHASES
    }
    cpu_s, collate_s, load_s = [], [], []
    if all(w.cores and w.collate_s for w in windows):
        cpu_s = [
            median(w.cores[rank] * w.wall_s[rank] / w.steps for w in windows) for rank in ranks
        ]
        collate_s = [median(w.collate_s[rank] / w.steps for w in windows) for rank in ranks]
    if all(w.load_s for w in windows):
        load_s = [median(w.load_s[rank] / w.steps for w in windows) for rank in ranks]
    return Evidence(spent_s, cpu_s, collate_s, load_s, run)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _is_long(wait_s: float, step_s: float) -> bool:
    """Whether ranks wait long enough in each step of `step_s`, so that it is worth a word."""
    return wait_s >= max(_LEAST_WAIT_S, _LEAST_SHARE * step_s)


def duration(seconds: float) -> str:
    """Seconds as text, with three digits."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


# --- a rank that the others wait for ---


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """Ranks that the others wait for in each step.

    Args:
        ranks: Those that take longer in the same phase.
        factor: Their own time by that of the others: a lower bound.
        step_s: Length of a step.
        wait_s: Time per step that the others wait for them.
        phase: What takes longer there than elsewhere.
        phase_s: Seconds per step in that phase, on these ranks and on the others.
    """

    ranks: Sequence[int]
    factor: float
    step_s: float
    wait_s: float
    phase: str
    phase_s: tuple[float, float]

    def title(self, names: str) -> str:
        """The sentence about them; `names` are "rank 3" or "ranks 2 and 3"."""
        takes, it = ("take", "them") if len(self.ranks) > 1 else ("takes", "it")
        return (
            f"{names} {takes} {self.factor:.2f}x the time of the others: they wait {duration(self.wait_s)} "
            f"for {it} in each step of {duration(self.step_s)}"
        )

    @property
    def comparison(self) -> str:
        """What takes how long there and elsewhere."""
        what = "the rest of the loop" if self.phase == "other" else self.phase
        here_s, there_s = self.phase_s
        return f"{what} takes {duration(here_s)} there, {duration(there_s)} elsewhere"


def find_late(waits_s: Sequence[Mapping[int, float]], step_s: float) -> list[int]:
    """The ranks that the others wait for in most steps of `step_s`, if any; the slowest first.

    The slowest is the rank that waits least. Ranks are late with it if they wait for it so little that it
    would be of no use to make it alone faster.

    Args:
        waits_s: In each of some windows of steps, by rank: the seconds per step that it waits for others.
    """
    if len(waits_s[0]) < 2:
        return []
    usual_s = {rank: median(window[rank] for window in waits_s) for rank in waits_s[0]}
    order = sorted(usual_s, key=lambda rank: usual_s[rank])
    leads = sorted(_leads(waits_s, order[0]))
    usual_lead_s = median(leads)
    # Most are about as large as their median. Random ones would have both signs.
    is_steady = leads[len(leads) // 4] > usual_lead_s / 2 > 0
    if not (is_steady and _is_long(usual_lead_s, step_s)):
        return []
    little_s = min(step_s - step_s / LEAST_GAIN, usual_lead_s / 2)
    late = [rank for rank in order if usual_s[rank] - usual_s[order[0]] < little_s]
    return late if len(late) < len(order) else []  # no rank is slower than others if all are


def lead_s(waits_s: Sequence[Mapping[int, float]], rank: int) -> float:
    """How much longer half of the other ranks wait in a step than this one, at least."""
    return median(_leads(waits_s, rank))


def _leads(waits_s: Sequence[Mapping[int, float]], rank: int) -> list[float]:
    return [
        median_low([wait_s for other, wait_s in window.items() if other != rank]) - window[rank]
        for window in waits_s
    ]


def judge_late(
    late: Sequence[int],
    *,
    step_s: float,
    wait_s: float,
    own_s: float,
    phases_s: Mapping[str, tuple[float, float]],
) -> Straggler | None:
    """How much slower these ranks are, and in which phase; None if that is too little to tell.

    Args:
        wait_s: That the others wait for them in a step.
        own_s: Time of a step in which they do not wait for others.
        phases_s: By phase, without waits: seconds of a step on these ranks, and on the others.
    """
    factor = own_s / max(own_s - wait_s, 0.01 * step_s)
    if factor < _LEAST_FACTOR:
        return None
    phase = max(phases_s, key=lambda name: phases_s[name][0] - phases_s[name][1])
    return Straggler(
        ranks=late,
        factor=factor,
        step_s=step_s,
        wait_s=wait_s,
        phase=phase,
        phase_s=phases_s[phase],
    )


def _straggler(windows: Sequence[Window], evidence: Evidence) -> Iterator[Finding]:
    waits_s = [
        {rank: sum(w.per_step(phase, rank) for phase in WAITS) for rank in evidence.ranks}
        for w in windows
    ]
    late = find_late(waits_s, evidence.step_s)
    if not late:
        return
    others = [rank for rank in evidence.ranks if rank not in late]
    own = {name: seconds for name, seconds in evidence.spent_s.items() if name not in WAITS}
    others_s = {name: median(seconds[rank] for rank in others) for name, seconds in own.items()}

    def slower_phase(rank: int) -> str:
        return max(own, key=lambda name: own[name][rank] - others_s[name])

    alike = [rank for rank in late if slower_phase(rank) == slower_phase(late[0])]
    found = judge_late(
        alike,
        step_s=evidence.step_s,
        wait_s=fmean(lead_s(waits_s, rank) for rank in alike),
        own_s=fmean(evidence.own_s(rank) for rank in alike),
        phases_s={name: (fmean(own[name][r] for r in alike), others_s[name]) for name in own},
    )
    if found is None or (found.phase == "data" and evidence.run.get("workers")):
        return  # see `_loading`
    details = "The gain is that of ranks as fast as the next slowest."
    if rest := set(late).difference(alike):
        details += (
            f" This includes {name_ranks(rest)}, which the others wait for too, in another phase."
        )
    next_s = max(evidence.own_s(rank) for rank in others)
    yield Finding(
        kind="straggler",
        title=f"{found.title(name_ranks(alike))} ({found.comparison})",
        cure=CURES[found.phase],
        gain=found.step_s / (found.step_s - max(evidence.own_s(late[0]) - next_s, 0.0)),
        details=details,
    )


# --- shares of the time alone ---


def judge_shares(shares: Mapping[str, float]) -> list[Finding]:
    """What limits a run of which only the share of each phase is known; the gain is an upper bound."""
    found = [
        Finding(
            kind=phase,
            title=f"{_percent(share)} of the time goes to {phase}",
            cure=CURES[phase],
            gain=1 / max(1 - share, 0.01),
        )
        for phase in _MOVABLE
        if (share := shares.get(phase, 0.0))
    ]
    return [finding for finding in found if finding.gain >= LEAST_GAIN]


# --- loading ---


def _loading(evidence: Evidence) -> Iterator[Finding]:
    data_s, run, step_s = evidence.spent_s["data"], evidence.run, evidence.step_s
    workers = run.get("workers")
    if workers is None:
        return
    waiting = [rank for rank in evidence.ranks if data_s[rank] >= _LEAST_DATA_SHARE * step_s]
    # If only some ranks wait, they are stragglers. But workers read ahead: if they are equally slow on all
    # ranks, the wait can be on the rank whose workers began last, and the other ranks wait for this one.
    if not waiting or (not workers and len(waiting) < len(evidence.ranks)):
        return
    # Seconds that one process needs for the batches of a step; w busy workers deliver w times as often.
    produce_s = max(evidence.load_s, default=0.0) if workers else max(data_s)
    busy = produce_s / (workers * step_s) if workers else 1.0
    if busy < _BUSY_SHARE:
        return
    rest_s = max(evidence.own_s(rank, {"data"}) for rank in evidence.ranks) + evidence.exposed_s
    cores, share = run.get("cores", 1), fmean(data_s[rank] for rank in waiting) / step_s
    details = (
        f"Each rank needs {duration(produce_s)} to produce the batches of a step, and the rest of the step "
        f"takes {duration(rest_s)}."
    )
    wanted, new_s = _with_workers(evidence, produce_s, rest_s, workers, cores)
    option = "DataLoader(..., num_workers=" if run.get("dataloader") else "Batches(..., workers="
    cure = f"{option}{wanted})"
    if step_s < LEAST_GAIN * new_s and share > _LARGE_DATA_SHARE:
        wanted, new_s = _with_workers(evidence, produce_s, rest_s, workers, 2 * cores)
        cure = f"samples that cost less, or {2 * cores} cores with {option}{wanted})"
        details += f" The {cores} cores of the host are busy, so more workers alone would not help."
    where = f" on {name_ranks(waiting, len(evidence.ranks))}" if len(evidence.ranks) > 1 else ""
    in_collate = fmean(evidence.collate_s or [0.0]) / fmean(data_s)
    if in_collate > _COLLATE_SHARE:
        where += f", {_percent(in_collate)} of that in the collate function"
    if workers:
        where += f", {workers} worker{'s' if workers > 1 else ''} busy {_percent(min(busy, 1.0))}"
    yield Finding(
        kind="collate" if in_collate > _COLLATE_SHARE else "data",
        title=f"input-bound: {_percent(share)} of the step waits for data{where}",
        cure=cure,
        gain=step_s / new_s,
        details=details,
    )


def _with_workers(
    evidence: Evidence, produce_s: float, rest_s: float, workers: int, cores: int
) -> tuple[int, float]:
    """How many workers a rank needs, at least one more than now, and the length of a step with them."""
    local = evidence.run.get("local_world_size", len(evidence.ranks))
    if evidence.cpu_s:
        least_s = fmean(evidence.cpu_s) * local / (_USABLE_SHARE * cores)
    else:  # unknown: as if loading used a core all the time
        least_s = produce_s * local / cores
    bound_s = max(rest_s, least_s, produce_s / (_HIDDEN_SHARE * _MOST_WORKERS))
    wanted = min(max(math.ceil(produce_s / (_HIDDEN_SHARE * bound_s)), workers + 1), _MOST_WORKERS)
    return wanted, max(rest_s, least_s, produce_s / wanted)


# --- communication ---


def _communication(evidence: Evidence) -> Iterator[Finding]:
    run, step_s, exposed_s = evidence.run, evidence.step_s, evidence.exposed_s
    link = run.get("link")
    if not link or run.get("mesh") or run.get("strategy") not in ("DDP", "Packed"):
        return
    total = run["gradient_bytes"]
    size = min(run.get("bucket_bytes") or total, total)
    count = math.ceil(total / size)
    explained_s = count * link["latency_s"] + total / link["bytes_per_s"]
    exposed_s = min(exposed_s, _LINK_FACTOR * explained_s)
    if not _is_long(exposed_s, step_s):
        return
    title = (
        f"communication-bound: each step of {duration(step_s)} waits {duration(exposed_s)} "
        "for communication"
    )
    yield from _buckets(evidence, exposed_s, size, title)
    yield from _compression(evidence, exposed_s, size, title)
    per_update_s = exposed_s + fmean(evidence.spent_s["optimizer"])
    k = _MOST_ACCUMULATION
    yield Finding(
        kind="accumulation",
        title=title,
        cure=f"Batches(..., global_batch={k * run['global_batch']}, micro_batch={_forward_size(run)})",
        changes="a larger batch, which is another training",
        gain=k * step_s / (k * (step_s - per_update_s) + per_update_s),
        details=f"The ranks communicate once for {k} times as many samples. An epoch has fewer updates of "
        "the weights, so the learning rate has to be chosen again.",
    )


def _forward_size(run: Mapping[str, Any]) -> int:
    """The samples of one forward of a rank, which `micro_batch` may not limit."""
    share = math.ceil(int(run["global_batch"]) / int(run["data_ranks"]))
    return min(int(run["micro_batch"]), share)


def _buckets(evidence: Evidence, exposed_s: float, size: int, title: str) -> Iterator[Finding]:
    run, link, step_s = evidence.run, evidence.run["link"], evidence.step_s
    total = run["gradient_bytes"]
    backward_s = fmean(evidence.spent_s["backward"])
    times_s = {
        mib: _exposed_s(link, total, min(mib * _MIB, total), backward_s)
        for mib in _BUCKETS_MIB
        if "bucket_bytes" in run and size < min(mib * _MIB, total)
    }
    best = min(times_s, key=lambda mib: times_s[mib], default=0)
    if not best or times_s[best] >= exposed_s:
        return
    yield Finding(
        kind="buckets",
        title=f"{title}, in {math.ceil(total / size)} buckets of {size / _MIB:.2g} MiB",
        cure=f"ddp(..., bucket_mb={best})",
        gain=step_s / (step_s - exposed_s + times_s[best]),
        details=f"Latency {duration(link['latency_s'])}, bandwidth {link['bytes_per_s'] / 1e6:.3g} MB/s, "
        "measured when the run began. On 3 and more ranks the last bits of a sum depend on the buckets.",
    )


def _exposed_s(link: Mapping[str, float], total: int, size: int, backward_s: float) -> float:
    count = -(-total // size)
    one_s = link["latency_s"] + total / count / link["bytes_per_s"]
    return max(count * one_s - backward_s * (1 - 1 / count), one_s)


def _compression(evidence: Evidence, exposed_s: float, size: int, title: str) -> Iterator[Finding]:
    run, link = evidence.run, evidence.run["link"]
    total = run["gradient_bytes"]
    last_s = link["latency_s"] + size / 2 / link["bytes_per_s"]
    left_s = max(exposed_s - total / 2 / link["bytes_per_s"], last_s)
    if run.get("compress") or left_s >= exposed_s:
        return
    yield Finding(
        kind="communication",
        title=title,
        cure='ddp(..., compress="bf16")',
        changes="gradients are rounded",
        gain=evidence.step_s / (evidence.step_s - exposed_s + left_s),
        details=f"It halves the {total / 1e6:.3g} MB of each step, at {link['bytes_per_s'] / 1e6:.3g} MB/s. "
        "Gradients lose 16 of 24 bits of their mantissa before they are summed.",
    )


# --- stalls ---


def _stalls(windows: Sequence[Window], run: Mapping[str, Any]) -> Iterator[Finding]:
    wall_s = sum(sum(window.wall_s) for window in windows)
    for phase, (cure, left, of) in STALLS.items():
        if phase == "checkpoint" and run.get("checkpoint_every_s") == "auto":
            continue
        stall_s = sum(sum(window.spent_s[phase]) for window in windows)
        left_s = left * (wall_s if of == "the time" else stall_s)
        if left_s < stall_s:
            yield Finding(
                kind=phase,
                title=f"{phase} takes {_percent(stall_s / wall_s)} of the time",
                cure=cure,
                gain=wall_s / (wall_s - stall_s + left_s),
                details=f"It then takes {_percent(left)} of {of}.",
            )
