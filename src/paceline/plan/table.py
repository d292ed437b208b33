"""What `paceline plan` shows: tables for the terminal, JSON, and the sections of an HTML page. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
        scaling: "strong", with the same global batch, or "weak", with the same samples of a rank.
        ways: By way to train, on each number of nodes; the run's own way first.
        one_node_rate: Samples per second of the run's own way on one node.
    """

    run: str
    measured: Measured
    link: Link
    scaling: str
    ways: dict[str, list[Estimate]]
    one_node_rate: float


def make(run: str, measured: Measured, link: Link, nodes: Sequence[int], *, weak: bool) -> Plan:
    """Estimate all ways on all numbers of nodes."""
    found = ways(measured, weak=weak)

    def of(way: Way) -> list[Estimate]:
        return [estimate(measured, link, way, number, weak=weak) for number in (1, *nodes)]

    own, *_ = of(next(iter(found.values())))
    return Plan(
        run=run,
        measured=measured,
        link=link,
        scaling="weak" if weak else "strong",
        ways={name: of(way)[1:] for name, way in found.items()},
        one_node_rate=own.samples_per_s,
    )


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
    own = next(iter(plan.ways.values()))
    points = [
        {"nodes": each.nodes, "samples/s": each.samples_per_s, "way": name}
        for name, found in plan.ways.items()
        for each in found
    ]

    def of_all(cell: Callable[[Estimate], str]) -> Table:
        head = ["", *(count_of(each.nodes, "node") for each in own)]
        return Table(head, [[name, *map(cell, found)] for name, found in plan.ways.items()])

    steps = Table(_STEP, [_row(plan, each) for each in own])
    rates = of_all(lambda e: f"{e.samples_per_s:,.4g} ({e.exposed_s / e.step_s:.0%})")
    what = "samples/s, and how much of a step waits for communication:"
    chart = charts.lines(points, x="nodes", y="samples/s", series="way")
    alt = "samples per second over the number of nodes, one line for each way to train"
    memory = of_all(lambda e: _bytes(e.memory_bytes))
    about = "memory of a rank after a step; on a GPU activations come on top:"
    return [
        Section(title="Steps", text=_head(plan), table=steps),
        Section(title="Samples per second", text=[what], table=rates, chart=chart, alt=alt),
        Section(title="Memory", text=[about], table=memory),
    ]


def _head(plan: Plan) -> list[str]:
    run, link = plan.measured, plan.link
    kept = {"weak": "samples of a rank stay", "strong": "global batch stays"}[plan.scaling]
    return [
        f"{plan.run}: {run.layout} on {count_of(run.nodes, 'node')} of "
        f"{count_of(run.ranks_per_node, 'rank')}. A step of {run.global_batch:,} samples took "
        f"{_ms(run.step_s)} ms, of which {_ms(run.communication_s)} ms waited for communication.",
        f"Link: {link.bytes_per_s * 8e-9:.3g} Gbit/s of payload, latency {link.latency_s * 1e6:.3g} us. "
        f"Gradients: {format_bytes(int(sum(run.buckets)))}. The {kept} the same "
        f"({plan.scaling} scaling).",
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
