"""What `paceline plan` shows: tables for the terminal, JSON, and the sections of an HTML page. Pure."""

from __future__ import annotations

from collections.abc import Sequence
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
    """The estimates of a run, by way and by number of nodes.

    Args:
        name: The folder of the run.
        weak: As for `estimate`.
        found: Each way with its estimates, in the order of `nodes`; the run's own way first.
        one_node: Of the run's own way, which efficiency is measured by.
    """

    name: str
    run: Measured
    link: Link
    weak: bool
    nodes: Sequence[int]
    found: Sequence[tuple[Way, list[Estimate]]]
    one_node: Estimate

    def efficiency(self, each: Estimate) -> float:
        """Samples per second, by those of as many single nodes."""
        return each.samples_per_s / each.nodes / self.one_node.samples_per_s


def make(name: str, run: Measured, link: Link, nodes: Sequence[int], *, weak: bool) -> Plan:
    """Estimate all ways on all numbers of nodes."""
    all_ways = ways(run, weak=weak)
    found = [(way, [estimate(run, link, way, n, weak=weak) for n in nodes]) for way in all_ways]
    one_node = estimate(run, link, all_ways[0], 1, weak=weak)
    return Plan(
        name=name, run=run, link=link, weak=weak, nodes=nodes, found=found, one_node=one_node
    )


def to_text(plan: Plan) -> str:
    """The plan as text for a terminal."""
    lines = list(_head(plan))
    for section in sections(plan):
        assert section.table is not None
        rows = [section.table.head, *section.table.rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["", *(text for text in section.text if section.title != _OWN)]
        lines += ["  ".join(map(str.rjust, row, widths)) for row in rows]
    return "\n".join(lines)


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON can represent it, with the numbers that it was made from."""
    return {
        "run": plan.name,
        "scaling": "weak" if plan.weak else "strong",
        "link": asdict(plan.link),
        "measured": asdict(plan.run),
        "ways": [
            {
                "name": way.name,
                "nodes": [asdict(e) | {"efficiency": plan.efficiency(e)} for e in each],
            }
            for way, each in plan.found
        ],
    }


_OWN = "As it is"


def sections(plan: Plan) -> list[Section]:
    """The run as it is, then all ways; for `paceline.report.page.to_html`."""
    own = plan.found[0][1]
    points = [
        {"nodes": e.nodes, "samples/s": e.samples_per_s, "way": way.name}
        for way, each in plan.found
        for e in each
    ]
    by_memory = {way.name: each for way, each in plan.found}
    head = ["", *(count_of(n, "node") for n in plan.nodes)]
    return [
        Section(
            title=_OWN, text=list(_head(plan)), table=Table(_STEP, [_row(plan, e) for e in own])
        ),
        Section(
            title="Samples per second",
            text=["samples/s of each way to train:"],
            table=Table(head, _rows(by_memory, lambda e: f"{e.samples_per_s:,.4g}")),
            chart=charts.lines(points, x="nodes", y="samples/s", series="way"),
            alt="samples per second over the number of nodes, one line for each way to train",
        ),
        Section(
            title="Waiting",
            text=["share of a step that waits for communication:"],
            table=Table(head, _rows(by_memory, lambda e: f"{e.exposed_s / e.step_s:.0%}")),
        ),
        Section(
            title="Memory",
            text=["memory of a rank after a step, without activations on a GPU:"],
            table=Table(head, _rows(by_memory, lambda e: _bytes(e.memory_bytes))),
        ),
    ]


def _rows(found: Any, cell: Any) -> list[list[str]]:
    return [[name, *map(cell, each)] for name, each in found.items()]


def _head(plan: Plan) -> Sequence[str]:
    run, link = plan.run, plan.link
    same = "samples of a rank" if plan.weak else "global batch"
    return (
        f"{plan.name}: {run.layout} on {count_of(run.nodes, 'node')} of "
        f"{count_of(run.ranks_per_node, 'rank')}. A step of {run.global_batch:,} samples took "
        f"{_ms(run.step_s)} ms, of which {_ms(run.communication_s)} ms waited for communication.",
        f"The link has {link.bytes_per_s * 8e-9:.3g} Gbit/s of payload and a latency of "
        f"{link.latency_s * 1e6:.3g} us; the gradients have {format_bytes(int(sum(run.buckets)))}. The "
        f"{same} stays the same ({'weak' if plan.weak else 'strong'} scaling).",
    )


def _row(plan: Plan, each: Estimate) -> list[str]:
    low, high = each.band_s
    return [
        str(each.nodes),
        str(each.ranks),
        _ms(each.step_s),
        f"{_ms(low)}-{_ms(high)}",
        f"{each.samples_per_s:,.4g}",
        f"{plan.efficiency(each):.0%}",
        each.limit,
        _bytes(each.memory_bytes),
    ]


def _bytes(size: float | None) -> str:
    return "unknown" if size is None else format_bytes(int(size))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"
