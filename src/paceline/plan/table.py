"""What `paceline plan` shows: tables for the terminal, and the sections of an HTML page. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from paceline.errors import count_of
from paceline.machine import format_bytes
from paceline.plan.model import Estimate, Link, Measured
from paceline.report import charts
from paceline.report.sections import Section, Table

_STEP = ["nodes", "ranks", "step, ms", "band, ms", "samples/s", "efficiency", "limit", "memory"]


def to_text(sections: Sequence[Section]) -> str:
    """Sections as text for a terminal."""
    lines: list[str] = []
    for section in sections:
        assert section.table is not None
        rows = [section.table.head, *section.table.rows]
        first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines += section.text
        lines += ["  ".join([r[0].ljust(first), *map(str.rjust, r[1:], widths)]) for r in rows]
        lines.append("")
    return "\n".join(lines[:-1])


def sections(head: Sequence[str], ways: Mapping[str, Sequence[Estimate]]) -> list[Section]:
    """The run's own way, then all ways.

    Args:
        head: What stands above the tables; see `describe`.
        ways: The estimates of each way, on the same numbers of nodes; the run's own way first.
    """
    own = next(iter(ways.values()))
    points = [
        {"nodes": each.nodes, "samples/s": each.samples_per_s, "way": name}
        for name, found in ways.items()
        for each in found
    ]

    def of_all(cell: Callable[[Estimate], str]) -> Table:
        names = ["", *(count_of(each.nodes, "node") for each in own)]
        return Table(names, [[name, *map(cell, found)] for name, found in ways.items()])

    rates = of_all(lambda e: f"{e.samples_per_s:,.4g} ({e.exposed_s / e.step_s:.0%})")
    what = "samples/s, and how much of a step waits for communication:"
    chart = charts.lines(points, x="nodes", y="samples/s", series="way")
    alt = "samples per second over the number of nodes, one line for each way to train"
    memory = of_all(lambda e: _bytes(e.memory_bytes))
    about = "memory of a rank after a step, with its gradients; activations come on top:"
    return [
        Section(title="Steps", text=head, table=Table(_STEP, [_row(each) for each in own])),
        Section(title="Samples per second", text=[what], table=rates, chart=chart, alt=alt),
        Section(title="Memory", text=[about], table=memory),
    ]


def describe(name: str, run: Measured, link: Link, *, weak: bool) -> list[str]:
    """What the estimates are made from."""
    kept = "samples of a rank (weak" if weak else "global batch (strong"
    return [
        f"{name}: {run.layout} on {count_of(run.nodes, 'node')} of "
        f"{count_of(run.ranks_per_node, 'rank')}. A step of {run.global_batch:,} samples took "
        f"{_ms(run.step_s)} ms, of which {_ms(run.communication_s)} ms waited for communication.",
        f"Link: {link.bytes_per_s * 8e-9:.3g} Gbit/s of payload, latency {link.latency_s * 1e6:.3g} us. "
        f"Gradients: {format_bytes(int(sum(run.buckets)))}. The same {kept} scaling).",
    ]


def _row(each: Estimate) -> list[str]:
    low, high = each.band_s
    return [
        str(each.nodes),
        str(each.ranks),
        _ms(each.step_s),
        f"{_ms(low)}-{_ms(high)}",
        f"{each.samples_per_s:,.4g}",
        f"{each.efficiency:.0%}",
        each.limit,
        _bytes(each.memory_bytes),
    ]


def _bytes(size: float | None) -> str:
    return "unknown" if size is None else format_bytes(int(size))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"
