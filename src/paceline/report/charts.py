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
_NUMBER = {"type": "quantitative"}
_STEP = {"field": "step", **_NUMBER, "title": "step"}
_MS = {"field": "ms", **_NUMBER, "title": "ms of one step"}


def curve(points: Sequence[tuple[int, float]], title: str) -> Spec:
    """A line over the steps."""
    values = [{"step": step, "value": value} for step, value in points]
    return _spec(
        values,
        mark={"type": "line", "point": len(values) < 40, "tooltip": True},
        encoding={
            "x": _STEP,
            "y": {"field": "value", **_NUMBER, "title": title, "scale": {"zero": False}},
        },
    )


def lines(values: Sequence[Mapping[str, Any]], *, x: str, y: str, series: str) -> Spec:
    """A line for each series. Values have these three fields; both axes are logarithmic."""
    log = {"type": "log", "base": 2}
    return _spec(
        values,
        mark={"type": "line", "point": True, "tooltip": True},
        encoding={
            "x": {"field": x, **_NUMBER, "scale": log},
            "y": {"field": y, **_NUMBER, "scale": log},
            "color": {"field": series, "type": "nominal", "sort": None, "title": None},
        },
    )


def breakdown(values: Sequence[Mapping[str, Any]]) -> Spec:
    """Areas over the steps. Values have `step`, `phase`, `order` and `ms`, for one step."""
    return _spec(
        values,
        mark={"type": "area", "interpolate": "step-after", "tooltip": True},
        encoding={"x": _STEP, "y": {**_MS, "stack": "zero"}, **_phases(values)},
    )


def bars(values: Sequence[Mapping[str, Any]]) -> Spec:
    """One bar for each rank. Values have `row`, `phase`, `order` and `ms`, for one step."""
    rows = list(dict.fromkeys(value["row"] for value in values))
    return _spec(
        values,
        height=_ROW * len(rows),
        mark={"type": "bar", "tooltip": True},
        encoding={
            "y": {"field": "row", "type": "nominal", "sort": rows, "title": "rank"},
            "x": {**_MS, "stack": "zero"},
            **_phases(values),
        },
    )


def _spec(values: Sequence[Mapping[str, Any]], **more: Any) -> Spec:
    return {"data": {"values": list(values)}, "width": "container", "height": _HEIGHT} | more


def _phases(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The color and the place of each phase that occurs, in the order of a step."""
    present = {value["phase"] for value in values}
    domain = [phase for phase in PHASES if phase in present]
    color = {
        "field": "phase",
        "type": "nominal",
        "scale": {"domain": domain, "range": [COLORS[phase] for phase in domain]},
        "legend": {"orient": "bottom", "columns": 4, "title": None},
    }
    return {"color": color, "order": {"field": "order", **_NUMBER}}
