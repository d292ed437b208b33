"""How the audit finds the model inside of wrappers, and its DDP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.parallel import DistributedDataParallel

from paceline.audit.events import Event, ForwardEnded, NotReduced
from paceline.audit.models import Models, ddp_of, inner_of, state_by_name, without_ddp
from paceline.audit.progress import Progress
from paceline.audit.record_loop import LoopHooks
from paceline.audit.run_plan import RunPlan
from paceline.audit.saved_weights import begin_evaluation, save_weights


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
    assert ddp_of(model) is model.module
    names = ["module.weight", "module.bias", "head.weight", "head.bias"]
    assert [name for name, _ in without_ddp(model, model.named_parameters())] == names
    assert list(state_by_name(model)) == names


@pytest.mark.usefixtures("one_rank")
def test_a_rank_that_pretrains_alone_numbers_the_training_as_the_others(tmp_path: Path) -> None:
    numbers = []
    for steps in (0, 3):
        recorder: Any = SimpleNamespace(write=lambda event: None)
        progress = Progress(RunPlan(tmp_path, "ordinary", 2, 20), recorder, 0)
        models = Models(recorder)
        hooks, optimizer = LoopHooks(progress, models), object()
        for _ in range(steps):
            models.on_call(nn.Linear(2, 1), trains=True)
            progress.on_step(optimizer)
        model = DistributedDataParallel.__new__(DistributedDataParallel)
        hooks.build_ddp(DistributedDataParallel.__init__, model, nn.Linear(2, 1))
        number = models.on_call(model, trains=True)
        progress.on_step(optimizer)
        progress.on_no_grad_forward(of_trained=True)
        numbers.append((progress.steps, progress.evaluation, number))
        models.ddp.clear()  # torch keeps the hooks of `models`, and with them its ports
    assert numbers == [(1, 101, 0)] * 2


def test_trained_and_untrained_models_have_different_numbers() -> None:
    models = Models(cast(Any, SimpleNamespace(write=lambda event: None)))
    numbers = [models.on_call(nn.Linear(1, 1), trains=n % 2 == 0) for n in range(210)]
    assert len(set(numbers)) == len(models.by_number()) == 210


@pytest.mark.usefixtures("one_rank")
def test_which_parameters_of_a_model_are_outside_of_the_ddp_in_it() -> None:
    seen: list[Any] = []
    recorder: Any = SimpleNamespace(write=seen.append)
    trunk = DistributedDataParallel(nn.Linear(2, 2))
    for model in (nn.ModuleDict({"trunk": trunk, "head": nn.Linear(2, 1)}), trunk):
        models = Models(recorder)
        models.on_call(model, trains=True)
        models.restart()  # torch keeps the hooks of `models`, and with them its ports
    assert [each.outside_ddp for each in seen] == [["head.weight", "head.bias"], []]


@pytest.mark.usefixtures("one_rank")
def test_only_trained_parameters_that_ddp_does_not_know_are_reported() -> None:
    """Two models with equal names: the first one has a new parameter without an optimizer."""
    events: list[Event] = []
    recorder: Any = SimpleNamespace(write=events.append)
    models = Models(recorder)
    nets = [nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]
    for net in nets:
        models.add_ddp(DistributedDataParallel(net))
        models.on_call(net, trains=True)
        net.append(nn.Linear(2, 2))
    models.report_unreduced(nets[1][0].parameters(), 0)
    assert not [e for e in events if isinstance(e, NotReduced)]
    for steps_done in (1, 2):
        models.report_unreduced(nets[1].parameters(), steps_done)
    models.ddp.clear()  # torch keeps the hooks of `models`, and with them its ports
    reported = [e for e in events if isinstance(e, NotReduced)]
    assert [e.name for e in reported] == ["model 1: 1.weight", "model 1: 1.bias"]
    assert {e.steps_done for e in reported} == {1}


def test_parameters_of_no_called_model_have_names_of_their_own() -> None:
    models = Models(cast(Any, SimpleNamespace(write=lambda event: None)))
    one, other = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    names = [models.name_of(each) for each in (one, other, one)]
    assert names == ["a parameter of shape [3]", "a parameter of shape [3] (2)", names[0]]
    del one
    assert models.name_of(nn.Parameter(torch.zeros(3))) == "a parameter of shape [3] (3)"


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def test_forwards_after_one_that_raised_are_recorded(tmp_path: Path) -> None:
    events: list[Event] = []
    recorder: Any = SimpleNamespace(write=events.append)
    progress = Progress(RunPlan(tmp_path, "ordinary", 2, 20), recorder, 0)
    hooks = LoopHooks(progress, Models(recorder))
    handles = [
        register_module_forward_pre_hook(hooks.before_forward),
        register_module_forward_hook(hooks.after_forward, with_kwargs=True, always_call=True),
    ]
    with pytest.raises(NotImplementedError):
        Raises()(torch.ones(1, 2))
    nn.Linear(2, 1)(torch.ones(3, 2))
    for handle in handles:
        handle.remove()
    (forward,) = [event for event in events if isinstance(event, ForwardEnded)]
    assert forward.samples == 3


@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_a_step_that_only_makes_the_state_of_an_optimizer_is_none(
    lr: float, tmp_path: Path
) -> None:
    """As in `set_optimizer_state_dict` of torch: with a rate of 0, before the first backward."""
    events: list[Event] = []
    recorder: Any = SimpleNamespace(write=events.append)
    progress = Progress(RunPlan(tmp_path, "ordinary", 2, 20), recorder, 0)
    hooks = LoopHooks(progress, Models(recorder))
    net = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    hooks.before_step(optimizer, (), {})
    hooks.after_step(optimizer, (), {})
    assert progress.steps == bool(lr)
    assert bool(events) == bool(lr)


def test_a_lazy_module_before_its_first_forward_is_no_reason_to_fail(tmp_path: Path) -> None:
    recorder: Any = SimpleNamespace(write=lambda event: None)
    model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1))
    for mode, source in (("ordinary", None), ("union", tmp_path)):
        plan = RunPlan(tmp_path, cast(Any, mode), 1, 20, source=source)
        progress, models = Progress(plan, recorder, 0), Models(recorder)
        models.on_call(model, trains=True)
        progress.evaluation = 1
        begin_evaluation(progress, models)
        save_weights(progress)
        assert (tmp_path / "weights-1-0.pt").exists()
