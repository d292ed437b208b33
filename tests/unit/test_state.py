"""The state of models and optimizers by name, in one process."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import CheckpointError
from paceline.training import state

Case = tuple[list[nn.Module], list[torch.optim.Optimizer]]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


class Odd(nn.Linear):
    """Its state has a key that is no attribute, as quantized layers have, and a value that is no tensor."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = torch.ones(1)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        del state_dict[f"{prefix}weight.absmax"]
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, value: dict[str, int]) -> None:
        assert value == {"calls": 3}


class Counting(torch.optim.SGD):
    """Keeps what is no tensor, and what belongs to no parameter."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["calls"] = self.state[p].get("calls", 0) + 1
        self.state["all"] = {"seen": 7}


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def _usual() -> Case:
    net = _net()
    return [net], [torch.optim.AdamW(net.parameters(), lr=0.1)]


def _tied() -> Case:
    net = Tied()
    return [net], [torch.optim.Adam(net.parameters())]


def _odd() -> Case:
    net = Odd(3, 1)
    return [net], [Counting(net.parameters(), lr=0.1, momentum=0.9)]


def _unused() -> Case:
    net = nn.ModuleDict({"used": nn.Linear(3, 1), "unused": nn.Linear(3, 1)})
    net.forward = lambda x: net["used"](x)  # type: ignore[method-assign]
    return [net], [torch.optim.AdamW(net.parameters())]


def _two_models() -> Case:
    first, last = nn.Linear(3, 3), nn.Linear(3, 1)
    both = torch.optim.Adam(
        [{"params": last.parameters()}, {"params": first.parameters(), "lr": 0.5}]
    )
    return [nn.Sequential(first), last], [both]


def _added_group() -> Case:
    net = _net()
    optimizer = torch.optim.AdamW(net[0].parameters(), lr=0.1)
    optimizer.add_param_group({"params": net[2].parameters(), "lr": 0.3})
    return [net], [optimizer]


def _outside() -> Case:
    net, scale = nn.Linear(3, 1), nn.Parameter(torch.ones(()))
    net.forward = lambda x: scale * nn.functional.linear(x, net.weight)  # type: ignore[method-assign]
    groups = [
        {"params": [scale], "lr": 0.0},
        {"params": [net.weight]},
    ]  # `scale` itself is not saved
    return [net], [torch.optim.Adam(groups)]


def _train(case: Case) -> None:
    models, optimizers = case
    value = torch.randn(4, 3, generator=torch.Generator().manual_seed(5))
    for _ in range(2):
        x = value
        for model in models:
            x = model(x)
        x.square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _values(case: Case) -> Any:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        return value.tolist() if isinstance(value, torch.Tensor) else value

    return plain(copy.deepcopy(state.save(*case)))


@pytest.mark.parametrize(
    "make", [_usual, _tied, _odd, _unused, _two_models, _added_group, _outside]
)
def test_training_continues_from_a_loaded_state(make: Callable[[], Case]) -> None:
    torch.manual_seed(1)
    source = make()
    _train(source)
    for optimizer in source[1]:
        optimizer.param_groups[-1]["lr"] = 0.05
    next(iter(source[0][0].parameters())).requires_grad_(False)
    saved = copy.deepcopy(state.save(*source))
    torch.manual_seed(2)
    target = make()
    next(iter(target[0][0].parameters())).requires_grad_(False)
    state.check(*target, saved)
    state.load(*target, saved)
    assert _values(target) == _values(source)
    for models, _ in (source, target):  # the state of a frozen parameter is kept for later
        next(iter(models[0].parameters())).requires_grad_(True)
    for case in (source, target):
        _train(case)
    assert _values(target) == _values(source)


def test_weights_of_another_model_are_refused_with_a_fix_that_exists(tmp_path: Path) -> None:
    torch.save(nn.Linear(3, 3).state_dict(), tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="weight: the model has shape") as raised:
        paceline.load_weights(nn.Linear(3, 4), tmp_path / "w.pth")
    assert "resume" not in raised.value.fix  # which is no argument of `load_weights`


def test_parameters_in_another_order_keep_their_own_state() -> None:
    source, target = _usual(), _usual()
    assert state.save(*source)["optimizers"][0]["state"] == {}
    assert not source[1][0].state  # a new optimizer is saved without a step
    target[1][0] = torch.optim.AdamW(reversed([*target[0][0].parameters()]), lr=0.1)
    _train(source)
    saved = state.save(*source)
    state.check(*target, saved)
    state.load(*target, saved)
    for p, q in zip(source[0][0].parameters(), target[0][0].parameters(), strict=True):
        assert torch.equal(source[1][0].state[p]["exp_avg"], target[1][0].state[q]["exp_avg"])


def test_another_model_or_optimizer_is_refused() -> None:
    saved = copy.deepcopy(state.save(*_added_group()))
    net = _net()
    sgd = torch.optim.SGD
    cases: list[tuple[Any, Any, str]] = [
        ([net], [sgd(net.parameters())], r"groups of \[6\] parameters, the checkpoint of \[2, 2\]"),
        (
            [net],
            [sgd([{"params": net[2].parameters()}, {"params": net[0].parameters()}])],
            r"group 0 of optimizer 0 and of the checkpoint differ in 0\.0\.bias",
        ),
        ([net, net], [sgd(net.parameters())], "holds 1 models, not 2"),
        ([net], [], "holds 1 optimizers, not 0"),
        (
            [nn.Sequential(nn.Linear(3, 4))],
            [sgd(net.parameters())],
            r"0\.bias: the model has shape \[4\], the checkpoint has shape \[3\]",
        ),
    ]
    groups = [{"params": net[0].parameters()}, {"params": net[2].parameters()}]
    cases.append(
        ([net], [sgd(groups)], "optimizer 0 is SGD, the checkpoint was trained with AdamW")
    )
    for models, optimizers, text in cases:
        with pytest.raises(CheckpointError, match=text):
            state.check(models, optimizers, saved)
    with pytest.raises(CheckpointError, match="version 3; this release reads version 2"):
        state.check([net], [sgd(net.parameters())], saved | {"version": 3})


def test_a_kept_state_gets_the_names_of_its_object_and_keeps_its_types() -> None:
    own = {"model.module.w": 0, "_orig_mod.b": 0, "seen": Counter()}
    saved = {"model.w": 1, "b": 2, "seen": Counter(a=3), "more": [4]}
    found = state.fitted(own, saved)
    assert found == {"model.module.w": 1, "_orig_mod.b": 2, "seen": Counter(a=3), "more": [4]}
    assert type(found["seen"]) is Counter
    # Two names that differ only in wrappers are two names.
    assert state.fitted({"w": 0}, {"w": 1, "module.w": 2}) == {"w": 1, "module.w": 2}
