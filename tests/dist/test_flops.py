"""The utilisation of devices, from a rate and the operations of a sample."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainings import make_data, make_training, train

import paceline
from paceline.metrics.flops import facts, peak_of, utilisation
from paceline.report.run import load
from paceline.report.sections import sections
from paceline.testing import run_ranks


def test_the_longest_matching_name_counts() -> None:
    assert peak_of("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_of("NVIDIA H100 PCIe") == 756e12
    assert peak_of("NVIDIA GH200 480GB") == 989e12
    assert peak_of("NVIDIA L40S") == 362e12
    assert peak_of("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_of("NVIDIA L40") is None
    assert peak_of("NVIDIA RTX A4000") is None
    assert peak_of("Some other GPU") is None


def test_it_is_shared_by_the_ranks() -> None:
    run = {"flops": 6e9, "peak_flops": 312e12, "world_size": 8}
    assert utilisation(run, 160_000) == "38.5 % MFU"  # 6e9 * 160,000 / 8 of 312e12
    assert utilisation(run | {"peak_flops": None}, 160_000) == "120 TFLOP/s a rank"
    assert utilisation({"world_size": 8}, 160_000) == ""
    assert utilisation({"flops": 6e9}, 160_000) == ""  # of an older version, or a damaged file
    assert facts(None, torch.device("cpu")) == {}


def _train(job: Any, folder: str) -> None:
    model = paceline.ddp(job, torch.nn.Linear(4, 3))
    training = make_training(job, model, make_data(24), global_batch=12)
    for wrong in (0, -1.0, math.inf, math.nan):
        with pytest.raises(paceline.ConfigError, match="flops must be more than 0"):
            training.report(folder, flops=wrong)
    training.report(folder, flops=2e6)
    train(training, until=60)


def test_the_report_of_a_run_has_it(tmp_path: Path) -> None:
    run_ranks(_train, str(tmp_path), nproc=2)
    assert load(str(tmp_path)).record.run["flops"] == 2e6
    run = load(str(tmp_path))
    table = sections(run)[0].table
    assert table is not None
    value, words = dict(table.rows)["use of the devices"].split(" ", 1)
    assert words == "TFLOP/s a rank"
    assert float(value) == pytest.approx(run.rate * 2e6 / 2 / 1e12, rel=0.01)
