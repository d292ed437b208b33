"""Metrics for Weights & Biases. A front to the package `wandb`."""

from __future__ import annotations

import os
from typing import Any

from paceline import log
from paceline.metrics.logger import Values, require

# How long wandb waits for a server that does not answer; its own limits are 90 s, and none at the end. Both
# are shorter than the time that a logger has at the end of a job. What is not sent is kept on the disk.
_TIMEOUTS_S = {"init_timeout": 10.0, "finish_timeout": 20.0}


class WandB:
    """Logs to a run of Weights & Biases, which starts on rank 0 with the first values.

    If the run cannot be started, for example because the server does not answer, it is kept in a folder as
    with `mode="offline"`, and a warning says how to upload it. Without `settings` wandb waits 10 s for the
    server when the run starts, and 20 s when it ends.

    Args:
        options: For `wandb.init`: `project`, `name`, `config`, `dir`, `mode="offline"` and so on. A job that
            is restarted continues its run with `id="..."` and `resume="allow"`.

    Raises:
        ConfigError: wandb is not installed.

    Collective: none.
    """

    def __init__(self, **options: Any) -> None:
        require("wandb", extra="wandb")
        self._options = options
        self._run: Any = None
        self._exit_code = 0

    def log(self, step: int, values: Values) -> None:
        """Log the values of a step."""
        if self._run is None:
            self._run = self._start()
        self._run.log(dict(values), step=step)

    def fail(self) -> None:
        """Let `close` mark the run as failed."""
        self._exit_code = 1

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code)

    def _start(self) -> Any:
        import wandb

        known = wandb.Settings.model_fields  # older versions have no `finish_timeout`
        limits = {name: limit_s for name, limit_s in _TIMEOUTS_S.items() if name in known}
        options = {"settings": limits} | self._options
        try:
            return wandb.init(**options)
        except wandb.Error as error:  # the server is away, or refuses the key
            run = wandb.init(**(options | {"mode": "offline"}))
            log.logger.warning(
                "W&B has not started the run, so it is kept in %s; upload it with `wandb sync`. The training "
                "goes on. The error was: %s: %s",
                *(os.path.dirname(run.dir), type(error).__name__, error),
            )
            return run
