"""Metrics as a CSV table: one row per step."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from paceline.metrics.json_lines import keep_earlier
from paceline.metrics.logger import Values


class CSV:
    """Writes one row per step to a CSV file, with a column for each name.

    A name that appears for the first time gets a new column, and the file is rewritten. A resumed run
    continues its table: rows of an existing file are kept up to the first step that is logged. If that would
    remove all of them, they are of an earlier run, and the file is kept under another name.

    Collective: none.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path).absolute()  # the program may change its folder
        self._names: list[str] | None = None
        self._last = 0

    def log(self, step: int, values: Values) -> None:
        """Append a row."""
        row: dict[str, Any] = {"step": step, **values}
        if self._names is None or step <= self._last:  # after `Training.rollback`
            self._start(step)
        self._last = step
        assert self._names is not None
        new = [name for name in row if name not in self._names]
        if new:
            self._rewrite(self._read()[1], self._names + new)
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._names, restval="").writerow(row)

    def close(self) -> None:
        """Nothing to do: each row is written when it is logged."""

    def _start(self, step: int) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        names, rows = self._read()
        if names and "step" not in names:
            raise ValueError(f"{self._path} is another table: it has no column `step`")
        kept = [row for row in rows if row["step"].isdecimal() and int(row["step"]) < step]
        if not kept and rows:
            keep_earlier([self._path])
        self._rewrite(kept, names if kept else [])

    def _read(self) -> tuple[list[str], list[dict[str, Any]]]:
        """The columns, and the rows without those that a crash or a full disk has cut."""
        if not self._path.exists():
            return [], []
        with self._path.open(encoding="utf-8", newline="") as file:
            lines = file.readlines()
        if lines and not lines[-1].endswith("\n"):
            del lines[-1]
        reader = csv.DictReader(lines)
        rows = [row for row in reader if None not in row and None not in row.values()]
        return list(reader.fieldnames or []), rows

    def _rewrite(self, rows: list[dict[str, Any]], names: list[str]) -> None:
        scratch = self._path.with_name(self._path.name + ".new")
        with scratch.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, names, restval="")
            writer.writeheader()
            writer.writerows(rows)
        scratch.replace(self._path)
        self._names = names
