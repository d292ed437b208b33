"""Metrics as JSON lines: one object per step."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Any

from paceline import log

METRICS = "metrics.jsonl"  # the file of a run
OWN_NAMES = ("step", "epoch", "time_s")  # in every line of it, besides the logged values


class JSONLines:
    """Appends one line per step to a file.

    After `close`, the next line opens the file again. NaN and infinity are written as strings. If a line
    cannot be written, `log` raises an OSError and removes the part of it that is in the file.

    Collective: none.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()  # the program may change its folder
        self._file: FileIO | None = None
        self._last: tuple[int, float] | None = None  # step and time of the last line

    def rewind(self, step: int) -> float:
        """Remove the lines after `step`, which an interrupted run wrote, and what is not a line of a step.

        The file is read once: it is left as it is if this object has written no later step.

        Returns:
            `time_s` of the last line that is left; 0 if there is none.
        """
        if self._last is not None and self._last[0] <= step:
            return self._last[1]
        self.close()  # the file is replaced
        keep, time_s = _lines_up_to(self.path, step)
        scratch = self.path.with_name(self.path.name + ".new")
        scratch.write_bytes(b"".join(keep))
        scratch.replace(self.path)
        self._last = step, time_s
        return time_s

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a line."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
        size = self._file.seek(0, os.SEEK_END)  # after `truncate` the position is past the end
        line = {name: _jsonable(value) for name, value in values.items()}
        left = memoryview(json.dumps({"step": step, **line}).encode() + b"\n")
        try:
            while left:  # a disk that is nearly full takes a part
                left = left[self._file.write(left) :]
        except OSError:
            self._last = None  # a part of the line may be left
            with contextlib.suppress(OSError):
                self._file.truncate(size)
            raise
        self._last = step, values.get("time_s", 0.0)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _jsonable(value: Any) -> Any:
    # JSON has no NaN and no infinity.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _lines_up_to(path: Path, step: int) -> tuple[list[bytes], float]:
    """The lines of the steps up to `step`, without damaged ones, and `time_s` of the last."""
    lines: list[bytes] = []
    time_s = 0.0
    if not path.exists():
        return lines, time_s
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            values = json.loads(line)
        except ValueError:
            continue
        is_whole = line.endswith(b"\n") and isinstance(values, dict)
        if is_whole and isinstance(values.get("step"), int) and values["step"] <= step:
            lines.append(line)
            time_s = float(values.get("time_s", 0.0))
    return lines, time_s


def write_line(lines: JSONLines | None, step: int, values: Mapping[str, Any]) -> None:
    """Append a line, if there is a file. If it cannot be written, warn once; the training goes on."""
    if lines is None:
        return
    try:
        lines.log(step, values)
    except OSError as error:
        log.once(
            f"{lines.path.name} cannot be written: {error}. The training goes on; the lines of the steps "
            "in which this happens are missing."
        )


def keep_earlier(paths: Sequence[Path]) -> None:
    """Keep the files of an earlier run: `metrics.jsonl` becomes `metrics-1.jsonl`.

    They get the same number, which is the first that is free.

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
