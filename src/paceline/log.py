"""Messages for people: one logger, rank in front, no handler until a job starts.

A front to the standard `logging`. Information is shown by rank 0 alone, warnings by every rank.
`paceline run` prefixes each line with the rank itself, so the prefix is added here only where no
launcher of ours does it.
"""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger("paceline")

_said: set[str] = set()


class _RankFilter(logging.Filter):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        return self.rank == 0 or record.levelno >= logging.WARNING


def show(rank: int, world_size: int) -> logging.Handler | None:
    """Show the messages of this rank on standard error, unless the program handles them itself.

    Returns the handler added, to be taken away by `hide`; None where logging was set up already.
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
    """Take away what `show` added."""
    if handler is not None:
        logger.removeHandler(handler)
        _said.clear()


def once(message: str) -> None:
    """Warn with this message, the first time only."""
    if message not in _said:
        _said.add(message)
        logger.warning(message)
