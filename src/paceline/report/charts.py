"""The charts of a report, as specifications of Vega-Lite (https://vega.github.io/vega-lite/docs/).

Each has the width of its container. The page adds the colors of its light or dark theme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.clock.step_clock import PHASES

Spec = dict[str, Any]

# Work in cold colors, waits in warm ones; neighbours differ in lightness too, for those who see no color.
COLORS = {
    "data": "#e8a33d",
    "forward": "#9ecae1",
    "backward": "#3182bd",
    "communication": "#e6550d",
    "optimizer": "#08519c",
    "checkpoint": "#756bb1",
    "evaluation": "#31a354",
    "other": "#7f7f7f",
}
_HEIGHT = 220
_ROW = 28  # pixels of a bar


def _spec(values: Sequence[Mapping[str, Any]], **more: Any) -> Spec:
    return {"data": {"values": list(values)}, "width": "container", "height": _HEIGHT} | more


def _phases(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The color of each phase that occurs, in the order of a step."""
    present = {value["phase"] for value in values}
    domain = [phase for phase in PHASES if phase in present]
    return {
        "field": "phase",
        "type": "nominal",
        "sort": domain,
        "scale": {"domain": domain, "range": [COLORS[phase] for phase in domain]},
        "legend": {"orient": "bottom", "columns": 3, "title": None},
    }


def curve(values: Sequence[Mapping[str, Any]], title: str) -> Spec:
    """Lines over the steps. Values have `step`, `value` and `run`."""
    runs = list(dict.fromkeys(value["run"] for value in values))
    run: dict[str, Any] = {
        "field": "run",
        "type": "nominal",
        "scale": {"domain": runs},  # in the order of the tables
        "legend": {"orient": "bottom", "title": None},
    }
    return _spec(
        values,
        mark={"type": "line", "point": len(values) < 40, "tooltip": True},
        encoding={
            "x": {"field": "step", "type": "quantitative", "title": "step"},
            "y": {
                "field": "value",
                "type": "quantitative",
                "title": title,
                "scale": {"zero": False},
            },
            **({"color": run, "strokeDash": run} if len(runs) > 1 else {}),
        },
    )


def breakdown(values: Sequence[Mapping[str, Any]]) -> Spec:
    """Areas over the steps. Values have `step`, `phase` and `ms`, for one step."""
    return _spec(
        values,
        mark={"type": "area", "interpolate": "step-before", "tooltip": True},
        encoding={
            "x": {"field": "step", "type": "quantitative", "title": "step"},
            "y": {
                "field": "ms",
                "type": "quantitative",
                "title": "ms of one step",
                "stack": "zero",
            },
            "color": _phases(values),
            "order": {"field": "order", "type": "quantitative"},
        },
    )


def bars(values: Sequence[Mapping[str, Any]], title: str) -> Spec:
    """One bar for each `row`. Values have `row`, `phase` and `ms`, for one step."""
    rows = list(dict.fromkeys(value["row"] for value in values))
    return _spec(
        values,
        height=_ROW * len(rows),
        mark={"type": "bar", "tooltip": True},
        encoding={
            "y": {"field": "row", "type": "nominal", "sort": rows, "title": title},
            "x": {
                "field": "ms",
                "type": "quantitative",
                "title": "ms of one step",
                "stack": "zero",
            },
            "color": _phases(values),
            "order": {"field": "order", "type": "quantitative"},
        },
    )


def events(values: Sequence[Mapping[str, Any]], unit: str) -> Spec:
    """Marks in time. Values have `passed` (in `unit`), `kind` and `text`."""
    kinds = list(dict.fromkeys(value["kind"] for value in values))
    return _spec(
        values,
        height=_ROW * 2 * len(kinds),
        mark={"type": "point", "filled": True, "size": 70, "tooltip": {"content": "data"}},
        encoding={
            "x": {"field": "passed", "type": "quantitative", "title": f"{unit} since the start"},
            "y": {"field": "kind", "type": "nominal", "title": None},
            "shape": {"field": "kind", "type": "nominal", "legend": None},
        },
    )
