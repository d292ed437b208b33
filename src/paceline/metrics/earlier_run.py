"""Keeps the files of an earlier run in the same folder: `metrics.jsonl` becomes `metrics-1.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

from paceline import log


def keep_earlier(paths: Sequence[Path]) -> None:
    """Rename these files, all to the same number, which is the first that is free, and say so.

    Empty files are left, because a new run may overwrite them.

    Raises:
        OSError: a file cannot be renamed.
    """
    earlier = [path for path in paths if path.exists() and path.stat().st_size]
    if not earlier:
        return
    free = next(n for n in count(1) if not any(_numbered(path, n).exists() for path in paths))
    for path in earlier:
        path.rename(_numbered(path, free))
    log.logger.info(
        "%s of an earlier run %s kept as %s.",
        " and ".join(path.name for path in earlier),
        "is" if len(earlier) == 1 else "are",
        " and ".join(_numbered(path, free).name for path in earlier),
    )


def _numbered(path: Path, number: int) -> Path:
    return path.with_stem(f"{path.stem}-{number}")
