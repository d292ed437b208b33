"""Metrics for OpenTelemetry. A front to the package `opentelemetry-api`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from paceline.errors import ConfigError
from paceline.metrics.logger import Values


class OpenTelemetry:
    """Records metrics with a meter of OpenTelemetry, on rank 0: `paceline.step`, `paceline.samples`,
    `paceline.phase` (seconds, with the attributes `phase` and `rank`), `paceline.memory` (bytes, `rank`), and
    `paceline.value` with the attribute `name` for each logged value.

    Args:
        meter_provider: Where metrics go. None is the global one, which the program or
            `opentelemetry-instrument` sets; without one nothing is sent.

    Raises:
        ConfigError: opentelemetry-api is not installed.

    Collective: none.
    """

    def __init__(self, meter_provider: Any = None) -> None:
        if importlib.util.find_spec("opentelemetry") is None:
            raise ConfigError(
                "opentelemetry-api is not installed.", fix="pip install 'paceline[opentelemetry]'"
            )
        self._provider = meter_provider
        self._meter: Any = None

    def _start(self) -> None:
        from opentelemetry.metrics import get_meter

        self._meter = get_meter("paceline", meter_provider=self._provider)
        self._step = self._meter.create_gauge(
            "paceline.step", description="Number of the last step"
        )
        self._samples = self._meter.create_counter(
            "paceline.samples", description="Samples of all ranks"
        )
        self._phase = self._meter.create_counter("paceline.phase", "s", "Time in each phase")
        self._memory = self._meter.create_gauge("paceline.memory", "By", "Memory in use")
        self._value = self._meter.create_gauge("paceline.value", description="A logged value")

    def log(self, step: int, values: Values) -> None:
        """Record the values of a step."""
        if self._meter is None:
            self._start()
        self._step.set(step)
        for name, value in values.items():
            self._value.set(value, {"name": name})

    def times(self, step: int, line: Mapping[str, Any]) -> None:
        """Record where the time of the last steps went; see `Logger.times`."""
        if self._meter is None:
            self._start()
        self._step.set(step)
        self._samples.add(line["samples"])
        for phase, spent_s in line["spent_s"].items():
            for rank, seconds in enumerate(spent_s):
                self._phase.add(max(seconds, 0.0), {"phase": phase, "rank": rank})
        for rank, memory in enumerate(line["memory_bytes"]):
            self._memory.set(memory, {"rank": rank})

    def close(self) -> None:
        """Hand over what is left, if the provider of this object can be flushed."""
        if hasattr(self._provider, "force_flush"):
            self._provider.force_flush()
