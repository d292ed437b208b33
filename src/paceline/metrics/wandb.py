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
        self._exit_code = 0

    def log(self, step: int, values: Values) -> None:
        """Log the values of a step."""
        if self._run is None:
            import wandb

            self._run = wandb.init(**self._options)
        self._run.log(dict(values), step=step)

    def fail(self) -> None:
        """Let `close` mark the run as failed."""
        self._exit_code = 1

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code)
