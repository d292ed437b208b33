"""DDP's front in a job of one process: nothing is wrapped, wrong input is still refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import paceline
from paceline.errors import ConfigError
from paceline.parallel.modules import equalize_buffers, find_wrapper


def test_one_process_gets_its_own_module_back() -> None:
    net = nn.Linear(2, 1)
    with paceline.join() as job:
        assert paceline.ddp(job, net) is net
        assert paceline.ddp(job, net, find_unused=True) is net
        assert paceline.unwrap(net) is net
        assert find_wrapper(net) is None
        equalize_buffers(job, net)
        assert net.weight.grad is None
        assert not hasattr(net, "require_backward_grad_sync")


def test_wrong_modules_are_named() -> None:
    with paceline.join(device="cpu") as job:
        with pytest.raises(ConfigError, match="no trainable parameter"):
            paceline.ddp(job, nn.Linear(2, 1).requires_grad_(False))
        with pytest.raises(ConfigError, match="ReLU has no trainable parameter"):
            paceline.ddp(job, nn.ReLU())
        with pytest.raises(ConfigError, match="has no shape yet"):
            paceline.ddp(job, nn.LazyLinear(1))


@pytest.mark.parametrize("bucket_mb", [0, -1.0, float("nan"), "large", None, "auto"])
def test_bucket_size_must_be_positive(bucket_mb: Any) -> None:
    with (
        paceline.join() as job,
        pytest.raises(ConfigError, match="bucket_mb"),
    ):
        paceline.ddp(job, nn.Linear(1, 1), bucket_mb=bucket_mb)
