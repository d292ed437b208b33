"""Metrics for TensorBoard. A front to `torch.utils.tensorboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.metrics.logger import Values, require


class TensorBoard:
    """Writes scalars for TensorBoard to a folder.

    Steps that an earlier run has written there are no longer shown, from the first logged step on.

    Raises:
        ConfigError: TensorBoard is not installed.

    Collective: none.
    """

    def __init__(self, folder: str | Path) -> None:
        require("tensorboard", extra="tensorboard")
        self._folder = str(Path(folder).absolute())
        self._writer: Any = None
        self._last = 0

    def log(self, step: int, values: Values) -> None:
        """Write the values of a step."""
        if step <= self._last:  # after `Training.rollback`
            self.close()
            self._writer = None
        self._last = step
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._folder, purge_step=step)
        for name, value in values.items():
            if name not in ("epoch", "time_s"):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
