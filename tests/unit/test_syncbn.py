"""Conversion and inspection of BatchNorm layers in one process."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import ConfigError, StepError
from paceline.parallel import syncbn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
        self.head = nn.BatchNorm1d(2)


class OwnNorm(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input * 2)


def test_converts_in_place_and_keeps_the_state() -> None:
    net = Net()
    before = net.state_dict()
    with paceline.join() as job:
        assert syncbn.sync_batchnorm(job, net) is net
        assert [type(m) for m in syncbn.batchnorms(net)] == [syncbn.SyncBatchNorm] * 2
        assert net.state_dict().keys() == before.keys()
        assert syncbn.batchnorms(net)[0].running_mean is net.stem[1].running_mean
        with pytest.raises(ValueError, match="expected at least 2D input"):
            net.stem[1](torch.ones(3))
        assert syncbn.plain_batchnorms(net) == []
        syncbn.sync_batchnorm(job, net)  # again is harmless
        net.load_state_dict(Net().state_dict())
    with pytest.raises(StepError, match="has been left"):
        net.head(torch.randn(3, 2))
    net.eval()
    assert torch.equal(net.head(torch.ones(3, 2)), nn.BatchNorm1d(2).eval()(torch.ones(3, 2)))


def test_a_module_without_batchnorm_is_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    linear = nn.Linear(1, 1)
    with paceline.join() as job, caplog.at_level("INFO", "paceline"):
        assert syncbn.sync_batchnorm(job, linear) is linear
    assert "Linear has no BatchNorm layer" in caplog.text


def test_refuses_what_has_no_shape() -> None:
    with paceline.join() as job, pytest.raises(ConfigError, match="no shape yet"):
        syncbn.sync_batchnorm(job, nn.Sequential(nn.LazyBatchNorm1d()))


def test_a_layer_with_its_own_forward_is_left_and_listed() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), OwnNorm(2))
    with paceline.join() as job:
        syncbn.sync_batchnorm(job, net)
    assert isinstance(net[1], OwnNorm)
    assert syncbn.plain_batchnorms(net) == ["1"]


def test_frozen_layers_are_no_reason_to_warn() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False))
    assert syncbn.plain_batchnorms(net) == ["0", "1"]
    assert syncbn.plain_batchnorms(net.eval()) == ["1"]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("micro_batch", [2, 8])
def test_warns_of_statistics_that_depend_on_the_number_of_ranks(
    world_size: int,
    micro_batch: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with paceline.join() as job, caplog.at_level(logging.WARNING, "paceline"):
        monkeypatch.setattr(job, "world_size", world_size)
        net = syncbn.sync_batchnorm(job, Net())
        syncbn.warn_other_statistics(job, net, micro_batch=micro_batch, global_batch=8)
        monkeypatch.setattr(job, "world_size", 1)
    texts = [record.message for record in caplog.records]
    assert len(texts) == (micro_batch == 2)
    assert all(f": {2 * world_size} on {world_size}" in text for text in texts)
    assert all("leave micro_batch out" in text for text in texts)


@pytest.mark.parametrize(("world_size", "times"), [(1, 0), (2, 1)])
def test_warns_once_and_only_of_several_ranks(
    world_size: int, times: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with paceline.join() as job, caplog.at_level(logging.WARNING, "paceline"):
        monkeypatch.setattr(job, "world_size", world_size)
        for _ in range(2):
            syncbn.warn_other_statistics(job, Net(), micro_batch=4, global_batch=4)
            layer = nn.BatchNorm1d(2, track_running_stats=False)
            syncbn.sync_batchnorm(job, nn.Sequential(layer, nn.BatchNorm1d(2)))
        monkeypatch.setattr(job, "world_size", 1)
    texts = [record.message for record in caplog.records]
    assert ["stem.1, head" in text for text in texts] == [True, False][: 2 * times]
    assert all("BatchNorm in 0 has no running statistics" in text for text in texts[1:])
