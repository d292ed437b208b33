"""Messages to the user: one logger, without a handler until a job starts. A front to `logging`.

Only rank 0 shows information; every rank shows warnings. `paceline run` prefixes each line with the rank;
under other launchers the prefix is added here.
"""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger("paceline")

_shown: set[str] = set()


class _RankFilter(logging.Filter):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        return self.rank == 0 or record.levelno >= logging.WARNING


def show(rank: int, world_size: int) -> logging.Handler | None:
    """Show the messages of this rank on standard error, unless the program has configured logging.

    Returns:
        The handler that was added, for `hide`; None if logging was configured already.
    """
    if logger.handlers or logging.getLogger().handlers:
        return None
    prefixed = os.environ.get("PACELINE_LAUNCHED") == "1" or world_size == 1
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(
            "paceline: %(message)s" if prefixed else f"[{rank}] paceline: %(message)s"
        )
    )
    handler.addFilter(_RankFilter(rank))
    logger.addHandler(handler)
    logger.setLevel(os.environ.get("PACELINE_LOG", "INFO").upper())
    return handler


def hide(handler: logging.Handler | None) -> None:
    """Remove the handler that `show` added."""
    if handler is not None:
        logger.removeHandler(handler)
        _shown.clear()


def once(message: str) -> None:
    """Log this warning, the first time only."""
    if message not in _shown:
        _shown.add(message)
        logger.warning(message)
