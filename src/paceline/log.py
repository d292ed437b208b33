"""Messages to the user: one logger, without a handler until a job starts. A front to `logging`.

Only rank 0 shows information; every rank shows warnings. `paceline run` prefixes each line with the rank;
under other launchers the prefix is added here.
"""

from __future__ import annotations

import logging
import os
import sys

from paceline.errors import ConfigError

logger = logging.getLogger("paceline")

_shown: set[str] = set()


class _RankFilter(logging.Filter):
    rank = 0

    def filter(self, record: logging.LogRecord) -> bool:
        return self.rank == 0 or record.levelno >= logging.WARNING


_filter = _RankFilter()


def show(rank: int, world_size: int) -> logging.Handler | None:
    """Show the messages of this rank on standard error, unless the program has configured logging.

    Returns:
        The handler that was added, for `hide`; None if logging was configured already.

    Raises:
        ConfigError: PACELINE_LOG is not a level of `logging`.
    """
    level = os.environ.get("PACELINE_LOG", "INFO")
    if level.upper() not in logging.getLevelNamesMapping():
        known = ", ".join(sorted(logging.getLevelNamesMapping()))
        raise ConfigError(f"PACELINE_LOG={level} is not a level.", fix=f"use one of {known}.")
    _filter.rank = rank
    logger.addFilter(_filter)
    if logger.handlers or logging.getLogger().handlers:
        return None
    prefixed = os.environ.get("PACELINE_LAUNCHED") == "1" or world_size == 1
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(
            "paceline: %(message)s" if prefixed else f"[{rank}] paceline: %(message)s"
        )
    )
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    return handler


def hide(handler: logging.Handler | None) -> None:
    """Remove what `show` added."""
    if handler is not None:
        logger.removeHandler(handler)
    logger.removeFilter(_filter)
    _shown.clear()


def once(message: str) -> None:
    """Log this warning, the first time only."""
    if message not in _shown:
        _shown.add(message)
        logger.warning(message)
