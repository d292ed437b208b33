"""Digests of a few samples, to notice that ranks, or a job and its checkpoint, have different datasets."""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch

from paceline.data.digest import digest
from paceline.data.samples import Samples, checked_size
from paceline.data.workers import Failure, Workers, start_method
from paceline.errors import PacelineError
from paceline.job.job import Job

# Then the samples are not compared. A dataset that uses threads of this process may block in a forked one.
_TIMEOUT_S = 5.0


def read_content(job: Job, samples: Samples) -> list[int] | None:
    """The digests of the first, the middle and the last sample; None if they cannot be read."""
    size = checked_size(samples.dataset)
    ids = sorted({0, size // 2, size - 1})
    if samples.tensors is not None:
        return _digests(samples, ids)
    if (start_method() or multiprocessing.get_start_method()) != "fork":
        return None
    # In a process of its own: a file that the dataset opened here would be shared with later workers.
    workers = Workers(job, _Work(samples), 1, tasks=True, timeout_s=_TIMEOUT_S)
    try:
        workers.start([ids])
        digests: list[int] = workers.get()
    except PacelineError:
        return None  # the training reports it when it reads this sample
    except RuntimeError:
        workers.kill()
        return None
    finally:
        workers.close()
    return digests


def _digests(samples: Samples, ids: list[int]) -> list[int]:
    device = samples.ids_device
    return [digest(samples.read(0, 0, torch.tensor([n], device=device))) for n in ids]


class _Work:
    """Runs in the loader worker."""

    def __init__(self, samples: Samples) -> None:
        self.dataset = samples.dataset
        self._samples = samples

    def __getitem__(self, ids: list[int]) -> Any:
        try:
            return _digests(self._samples, ids)
        except PacelineError as error:
            return Failure.of(error)
