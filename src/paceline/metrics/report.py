"""Write a run's metrics to JSON lines, a progress bar and TensorBoard. Only rank 0 writes.

Values are kept while a step runs, and written when the control word has summed the losses of all ranks, so no
rank waits. A line of metrics.jsonl has the step, the epoch, `time_s` since the start, and the logged values.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch

from paceline.errors import ConfigError
from paceline.job.job import Job
from paceline.metrics.progress import Progress
from paceline.metrics.step_loss import StepLoss, StepTotal

_RATE_WINDOW_S = 1.0  # the rate over a shorter time varies too much to read

_OWN_NAMES = ("step", "epoch", "time_s")


class Report:
    def __init__(self, job: Job) -> None:
        self._active = False
        self._is_rank0 = job.rank == 0
        self._device = job.device
        self._pending: dict[int, tuple[int, int, dict[str, Any]]] = {}
        self._file: IO[str] | None = None
        self._path: Path | None = None
        self._progress: Progress | None = None
        self._board: Any = None
        self._began = time.perf_counter()
        self._window_began = self._began
        self._window_samples = 0
        self._rate = 0.0

    def open(self, folder: str | None, *, progress: bool, tensorboard: bool) -> None:
        """Choose the destinations; see `Training.report`.

        Raises:
            ConfigError: the folder cannot be made, or TensorBoard is not installed or has no folder.
        """
        if tensorboard and folder is None:
            raise ConfigError("tensorboard=True needs a folder to write to.")
        if not self._is_rank0:
            return
        if folder is not None:
            self._path = Path(folder) / "metrics.jsonl"
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"the folder {folder} cannot be made: {error.strerror}.",
                    fix="choose a folder that rank 0 may write to.",
                ) from error
        if progress:
            self._progress = Progress()
        if tensorboard:
            self._board = _tensorboard(Path(str(folder)) / "tensorboard")
        self._active = bool(self._path or self._progress or self._board)

    def begin(self, step: int, total: int | None) -> None:
        """Start after `step`, and remove the lines of later steps, which an interrupted run wrote."""
        if not self._active:
            return
        self._began = self._window_began = time.perf_counter()
        if self._path is not None:
            keep = _lines_up_to(self._path, step) if step else []
            if keep:  # time continues from the last line
                self._began -= json.loads(keep[-1])["time_s"]
            scratch = self._path.with_suffix(".jsonl.new")
            scratch.write_text("".join(keep))
            scratch.replace(self._path)
            self._file = self._path.open("a", encoding="utf-8")
        if self._progress is not None:
            self._progress.begin(step, total)

    def note(self, step: int, epoch: int, num_samples: int, values: dict[str, Any]) -> None:
        if not self._active:
            return
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                # It is read later, and the program may change it in between.
                values[name] = value.detach().clone()
        if step in self._pending:
            self._pending[step][2].update(values)
        else:
            self._pending[step] = (epoch, num_samples, values)

    def write(self, totals: Sequence[StepTotal]) -> None:
        if not self._active:
            return
        now = time.perf_counter()
        last = None
        device = _gpu_use(self._device)
        for total in totals:
            noted = self._pending.pop(total.step, None)
            if noted is None:
                continue
            epoch, num_samples, values = noted
            self._window_samples += num_samples
            mean = total.loss_sum / total.count if total.count else float("nan")
            numbers = {name: _number(value, mean) for name, value in values.items()}
            last = {
                "step": total.step,
                "epoch": epoch,
                "time_s": round(now - self._began, 4),
                **numbers,
                **device,
            }
            self._write_line(last)
        elapsed = now - self._window_began
        if elapsed >= _RATE_WINDOW_S or not self._rate:
            self._rate = self._window_samples / max(elapsed, 1e-9)
            self._window_began, self._window_samples = now, 0
        if last is not None and self._progress is not None:
            self._progress.show(last, self._rate)

    def end(self) -> None:
        """Close the destinations; `begin` may open them again."""
        if self._progress is not None:
            self._progress.end()
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._board is not None:
            self._board.flush()

    def _write_line(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        if self._board is not None:
            for name, value in line.items():
                if name not in _OWN_NAMES and not isinstance(value, str):
                    self._board.add_scalar(name, value, line["step"])


@functools.cache
def _has_pynvml() -> bool:
    return importlib.util.find_spec("pynvml") is not None


def _gpu_use(device: torch.device) -> dict[str, float]:
    """Percent of time that the GPU was busy, and GB in use; empty without an NVIDIA GPU and nvidia-ml-py."""
    if device.type != "cuda" or not _has_pynvml():
        return {}
    return {
        "gpu_busy_percent": float(torch.cuda.utilization(device)),
        "gpu_memory_gb": round(torch.cuda.device_memory_used(device) / 1e9, 2),
    }


def refuse_values(values: dict[str, Any]) -> None:
    """Raise ConfigError, on every rank, for values that cannot be logged."""
    for name, value in values.items():
        if name in _OWN_NAMES:
            raise ConfigError(
                f"{name!r} is written in every line already.", fix="log it under another name."
            )
        size = value.numel() if isinstance(value, torch.Tensor) else 1
        if size != 1 or not hasattr(value, "__float__"):
            got = f"{size} numbers" if size != 1 else type(value).__name__
            raise ConfigError(
                f"{name!r} must be one number, got {got}.",
                fix="log its mean, or each element under its own name.",
            )


def _number(value: Any, mean: float) -> float | int | str:
    if isinstance(value, StepLoss):
        return mean
    number = value if isinstance(value, int) else float(value)
    # JSON has no NaN and no infinity.
    return number if math.isfinite(number) else str(number)


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


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "TensorBoard is not installed.", fix="pip install 'paceline[tensorboard]'"
        ) from error
    return SummaryWriter(str(folder))
