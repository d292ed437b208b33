"""The latency and the bandwidth between ranks: all ranks agree, and the record of a run has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainings import make_data
from torch import nn

import paceline
from paceline.clock.link import measure_link
from paceline.clock.record import read_record
from paceline.testing import run_ranks


def _measure(job: Any, folder: str) -> dict[str, float]:
    model = paceline.ddp(job, nn.Linear(4, 3))
    batches = paceline.Batches(job, make_data(24), global_batch=12)
    training = paceline.Training(job, model, torch.optim.SGD(model.parameters(), lr=0.01), batches)
    training.report(folder)
    for _ in range(2):
        for step in training.steps():
            for x, y in step:
                step.backward(
                    nn.functional.cross_entropy(model(x), y, reduction="sum"),
                    count=len(x),
                    reduction="sum",
                )
            step.update()
            if job.rank == 0 and "link" in Path(folder, "clock.jsonl").read_text():
                step.stop()
    return measure_link(job.data.group, job.device, 10**6)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_ranks_agree_on_the_link(tmp_path: Path, ranks: int) -> None:
    first, *others = run_ranks(_measure, str(tmp_path), nproc=ranks)
    assert others == [first] * (ranks - 1)
    assert 0 < first["latency_s"] < 1
    assert first["bytes_per_s"] > 1e6
    record = read_record(tmp_path)
    assert [set(run["link"]) for run in record.runs] == [set(first)] * 2
    assert record.runs[0]["link"] == record.runs[1]["link"]  # measured once
    assert all(len(w.cores) == len(w.collate_s) == len(w.load_s) == ranks for w in record.windows)
