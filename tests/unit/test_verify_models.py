"""How the audit finds the model inside of wrappers, and its DDP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.audit.models import ddp_of, inner_of


class Wrapper(nn.Module):
    """As Fabric's: it holds the model that it was given, and calls the one that is wrapped."""

    def __init__(self, original: nn.Module, forward_module: nn.Module) -> None:
        super().__init__()
        self._original, self._forward_module = original, forward_module

    @property
    def module(self) -> nn.Module:
        return self._original


class WithHead(nn.Module):
    """A model that has a part with the name `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.head = nn.Linear(2, 2), nn.Linear(2, 1)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_the_model_inside_of_wrappers() -> None:
    model = nn.Linear(2, 1)
    ddp = DistributedDataParallel(model)
    for root in (model, ddp, Wrapper(model, ddp)):
        assert inner_of(root) is model
    assert ddp_of(model) is None
    assert ddp_of(ddp) is ddp
    assert ddp_of(Wrapper(model, ddp)) is ddp


@pytest.mark.usefixtures("one_rank")
def test_a_part_of_a_model_is_not_the_model() -> None:
    model = WithHead()
    assert inner_of(model) is model
    model.module = DistributedDataParallel(nn.Linear(2, 2))
    assert ddp_of(model) is None
