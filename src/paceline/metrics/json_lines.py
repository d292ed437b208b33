"""Metrics as JSON lines: one object per step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO

from paceline.metrics.logger import Values


class JSONLines:
    """Writes one line per step to a file, and flushes it.

    A file is closed by `close` and opened again by the next line.

    Collective: none.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: IO[str] | None = None

    def rewind(self, step: int) -> float:
        """Remove the lines after `step`, which an interrupted run wrote. Returns `time_s` of the last one."""
        keep = _lines_up_to(self._path, step) if step else []
        scratch = self._path.with_name(self._path.name + ".new")
        scratch.write_text("".join(keep))
        scratch.replace(self._path)
        return float(json.loads(keep[-1])["time_s"]) if keep else 0.0

    def log(self, step: int, values: Values) -> None:
        """Append a line."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _lines_up_to(path: Path, step: int) -> list[str]:
    if not path.exists():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        if json.loads(line)["step"] <= step:
            lines.append(line)
    return lines
