"""Metrics for Weights & Biases. A front to the package `wandb`."""

from __future__ import annotations

import importlib.util
from typing import Any

from paceline.errors import ConfigError
from paceline.metrics.logger import Values


class WandB:
    """Logs to a run of Weights & Biases, which starts on rank 0 with the first values.

    Args:
        options: For `wandb.init`: `project`, `name`, `config`, `dir`, `mode="offline"` and so on. A job that
            is restarted continues its run with `id="..."` and `resume="allow"`.

    Raises:
        ConfigError: wandb is not installed.

    Collective: none.
    """

    def __init__(self, **options: Any) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError("wandb is not installed.", fix="pip install 'paceline[wandb]'")
        self._options = options
        self._run: Any = None

    def log(self, step: int, values: Values) -> None:
        """Log the values of a step; NaN and infinity as numbers."""
        if self._run is None:
            import wandb

            self._run = wandb.init(**self._options)
        self._run.log(
            {name: float(v) if isinstance(v, str) else v for name, v in values.items()}, step=step
        )

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()
