"""Write a report as Markdown, or as one HTML page that needs no network.

The page embeds Vega once. Each chart stands beside a table that sums up its figures, so the page can be
read with a screen reader, without colors, and without JavaScript.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence

from paceline.metrics.logger import require
from paceline.report.sections import Section, Table

_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --page: #ffffff; --line: #d0d7de; --soft: #f4f6f8;
  --link: #0b5cad; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e8eb; --page: #14171a; --line: #3a4149; --soft: #1d2125; --link: #79b8ff; } }
body { margin: 0; padding: 1rem 2rem; color: var(--text); background: var(--page);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); }
main { display: grid; gap: 0 3rem; grid-template-columns: repeat(auto-fit, minmax(min(34rem, 100%), 1fr)); }
section { min-width: 0; }
p { margin: .3rem 0; }
p.first { padding: .6rem .8rem; background: var(--soft); border-left: 4px solid var(--link); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
div.table { overflow-x: auto; }
figure { margin: .5rem 0; }
figure > div { width: 100%; }
a { color: var(--link); }
nav ul { padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1rem; list-style: none; }
"""
_SCRIPT = """
const dark = matchMedia("(prefers-color-scheme: dark)");
function show() {
  const css = getComputedStyle(document.documentElement);
  const text = css.getPropertyValue("--text"), line = css.getPropertyValue("--line");
  const axis = {labelColor: text, titleColor: text, gridColor: line, domainColor: line, tickColor: line};
  const config = {background: "transparent", view: {stroke: line}, axis: axis,
    legend: {labelColor: text, titleColor: text}, font: "system-ui, sans-serif"};
  for (const [id, spec] of Object.entries(charts)) {
    const tooltip = {theme: dark.matches ? "dark" : "light"};
    const options = {renderer: "svg", actions: false, config: config, tooltip: tooltip};
    vegaEmbed("#" + id, {autosize: {type: "fit-x", contains: "padding"}, ...spec}, options);
  }
}
dark.addEventListener("change", show);
show();
"""


def to_markdown(title: str, sections: Sequence[Section]) -> str:
    """The report as Markdown, with the tables instead of the charts."""
    lines = [f"# {title}", ""]
    for section in sections:
        lines += [f"## {section.title}", ""]
        lines += [f"{text}\n" for text in section.text]
        if section.table is not None:
            table = section.table
            lines.append("| " + " | ".join(map(_cell, table.head)) + " |")
            lines.append("|---" * len(table.head) + "|")
            lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in table.rows]
            lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def to_html(title: str, sections: Sequence[Section]) -> str:
    """The report as one HTML page.

    Raises:
        ConfigError: vl-convert-python, which brings Vega, is not installed.
    """
    require("vl_convert", extra="report")
    import vl_convert

    charts = {f"chart{n}": s.chart for n, s in enumerate(sections) if s.chart is not None}
    # "</script>" in a string would end the script.
    data = json.dumps(charts, separators=(",", ":")).replace("</", "<\\/")
    vega = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace(
        "</script", "<\\/script"
    )
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
    )
    body = "\n".join(_body(title, sections))
    scripts = (
        f'<script type="module">{vega}</script>\n'
        f'<script type="module">const charts = {data};{_SCRIPT}</script>\n'
    )
    return f"{head}<body>\n{body}\n{scripts}</body>\n</html>\n"


def _body(title: str, sections: Sequence[Section]) -> Iterator[str]:
    yield f"<h1>{html.escape(title)}</h1>"
    yield '<nav aria-label="Sections"><ul>'
    for number, section in enumerate(sections):
        yield f'<li><a href="#section{number}">{html.escape(section.title)}</a></li>'
    yield "</ul></nav>\n<main>"
    for number, section in enumerate(sections):
        yield f'<section aria-labelledby="section{number}">'
        yield f'<h2 id="section{number}">{html.escape(section.title)}</h2>'
        for at, text in enumerate(section.text):
            mark = ' class="first"' if number == at == 0 else ""
            yield f"<p{mark}>{html.escape(text)}</p>"
        if section.chart is not None:
            label = html.escape(section.alt, quote=True)
            yield f'<figure role="img" aria-label="{label}"><div id="chart{number}"></div></figure>'
        if section.table is not None:
            yield from _table(section.table)
        yield "</section>"
    yield "</main>"


def _table(table: Table) -> Iterator[str]:
    yield '<div class="table"><table><thead><tr>'
    yield "".join(f'<th scope="col">{html.escape(name)}</th>' for name in table.head)
    yield "</tr></thead><tbody>"
    for first, *rest in table.rows:
        cells = "".join(f"<td>{html.escape(text)}</td>" for text in rest)
        yield f'<tr><th scope="row">{html.escape(first)}</th>{cells}</tr>'
    yield "</tbody></table></div>"
