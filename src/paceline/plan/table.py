"""What `paceline plan` shows: tables for the terminal, JSON, and the sections of an HTML page. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.errors import count_of
from paceline.machine import format_bytes
from paceline.plan.model import Estimate, Link, Measured, Way, estimate, ways
from paceline.report import charts
from paceline.report.sections import Section, Table

_STEP = ["nodes", "ranks", "step, ms", "band, ms", "samples/s", "efficiency", "limit", "memory"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The estimates of a run.

    Args:
        run: Its folder.
        weak: As for `estimate`.
        ways: Each way to train with its estimates, in the order of `nodes`; the run's own way first.
        one_node_rate: Samples per second of the run's own way on one node.
    """

    run: str
    measured: Measured
    link: Link
    weak: bool
    nodes: Sequence[int]
    ways: Sequence[tuple[Way, list[Estimate]]]
    one_node_rate: float


def make(run: str, measured: Measured, link: Link, nodes: Sequence[int], *, weak: bool) -> Plan:
    """Estimate all ways on all numbers of nodes."""
    all_ways = ways(measured, weak=weak)
    return Plan(
        run=run,
        measured=measured,
        link=link,
        weak=weak,
        nodes=nodes,
        ways=[(w, [estimate(measured, link, w, n, weak=weak) for n in nodes]) for w in all_ways],
        one_node_rate=estimate(measured, link, all_ways[0], 1, weak=weak).samples_per_s,
    )


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON can represent it, with the numbers that it was made from."""
    return asdict(plan) | {
        "ways": [
            asdict(way) | {"nodes": [asdict(each) for each in found]} for way, found in plan.ways
        ]
    }


def to_text(plan: Plan) -> str:
    """The plan as text for a terminal."""
    lines: list[str] = []
    for section in sections(plan):
        assert section.table is not None
        rows = [section.table.head, *section.table.rows]
        first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines += section.text
        lines += ["  ".join([r[0].ljust(first), *map(str.rjust, r[1:], widths)]) for r in rows]
        lines.append("")
    return "\n".join(lines[:-1])


def sections(plan: Plan) -> list[Section]:
    """The run's own way, then all ways; for `paceline.report.page.to_html`."""
    points = [
        {"nodes": each.nodes, "samples/s": each.samples_per_s, "way": way.name}
        for way, found in plan.ways
        for each in found
    ]

    def of_all(cell: Callable[[Estimate], str]) -> Table:
        head = ["", *(count_of(n, "node") for n in plan.nodes)]
        return Table(head, [[way.name, *map(cell, found)] for way, found in plan.ways])

    return [
        Section(
            title="Steps",
            text=_head(plan),
            table=Table(_STEP, [_row(plan, each) for each in plan.ways[0][1]]),
        ),
        Section(
            title="Samples per second",
            text=["samples/s, and how much of a step waits for communication:"],
            table=of_all(lambda e: f"{e.samples_per_s:,.4g} ({e.exposed_s / e.step_s:.0%})"),
            chart=charts.lines(points, x="nodes", y="samples/s", series="way"),
            alt="samples per second over the number of nodes, one line for each way to train",
        ),
        Section(
            title="Memory",
            text=["memory of a rank after a step; on a GPU activations come on top:"],
            table=of_all(lambda e: _bytes(e.memory_bytes)),
        ),
    ]


def _head(plan: Plan) -> list[str]:
    run, link = plan.measured, plan.link
    kept = "samples of a rank stay" if plan.weak else "global batch stays"
    return [
        f"{plan.run}: {run.layout} on {count_of(run.nodes, 'node')} of "
        f"{count_of(run.ranks_per_node, 'rank')}. A step of {run.global_batch:,} samples took "
        f"{_ms(run.step_s)} ms, of which {_ms(run.communication_s)} ms waited for communication.",
        f"Link: {link.bytes_per_s * 8e-9:.3g} Gbit/s of payload, latency {link.latency_s * 1e6:.3g} us. "
        f"Gradients: {format_bytes(int(sum(run.buckets)))}. The {kept} the same "
        f"({'weak' if plan.weak else 'strong'} scaling).",
    ]


def _row(plan: Plan, each: Estimate) -> list[str]:
    low, high = each.band_s
    return [
        str(each.nodes),
        str(each.ranks),
        _ms(each.step_s),
        f"{_ms(low)}-{_ms(high)}",
        f"{each.samples_per_s:,.4g}",
        f"{each.samples_per_s / each.nodes / plan.one_node_rate:.0%}",
        each.limit,
        _bytes(each.memory_bytes),
    ]


def _bytes(size: float | None) -> str:
    return "unknown" if size is None else format_bytes(int(size))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"
