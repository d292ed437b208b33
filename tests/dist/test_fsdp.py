"""A sharded model trains like one process, with ragged steps, empty ranks and clipping."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainings import (
    Trained,
    assert_close,
    check_messages,
    loss_sum,
    make_data,
    make_training,
    refusals,
    sgd,
    train,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import IterableDataset, TensorDataset

import paceline
from paceline import Mesh, log
from paceline.parallel.modules import local
from paceline.testing import digest, run_ranks

TOLERANCE = 1e-9  # float64: sums of at most 8 gradients in another order, over 5 steps of AdamW


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(7, 9), nn.Linear(9, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.outer(torch.tanh(self.inner(x)))
        return x + hidden


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, 7)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.last = nn.Linear(7, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        out: torch.Tensor = self.last(hidden)
        return out


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _train(
    job: Any,
    *,
    prepare: Callable[[Any], Any] = lambda net: None,
    export: Path | None = None,
    **options: Any,
) -> Trained:
    net = Net()
    prepare(net)
    with torch.no_grad():
        net.last.bias.add_(job.rank)  # ranks begin with the weights of rank 0
    model = paceline.fsdp(job, net, **options)
    sharded = all(isinstance(p, DTensor) for p in model.parameters())
    assert sharded == (job.world_size > 1)
    # 26 samples in steps of 8 and micro-batches of at most 1: the last step has 2, so that some of 4 ranks
    # have none.
    data = make_data(26, torch.float64)
    training = make_training(job, model, data, optimizer=_adamw, global_batch=8, micro_batch=1)
    found = train(training, until=5, clip_norm=0.5)
    if export is not None:
        training.export(export)
    return found


def _exporting(job: Any, path: Path) -> Trained:
    return _train(job, export=path)


def test_it_trains_as_one_process(tmp_path: Path) -> None:
    (want,) = run_ranks(_exporting, tmp_path / "1.pth", nproc=1)
    for nproc in (2, 4):
        path = tmp_path / f"{nproc}.pth"
        for got in run_ranks(_exporting, path, nproc=nproc):
            assert_close(got, want, TOLERANCE)
        torch.testing.assert_close(torch.load(path), want.weights, rtol=1e-8, atol=1e-10)


OPTIONS: list[dict[str, Any]] = [
    {"blocks": "blocks.*", "reshard_after_forward": False},
    {"blocks": [Block, "first"]},
]


def _with_options(job: Any) -> list[Trained]:
    return [_train(job, **options) for options in ({}, *OPTIONS)]


@pytest.mark.ci
def test_hybrid_sharding_and_options_train_as_one_process() -> None:
    (want,) = run_ranks(_train, nproc=1)
    for results in run_ranks(_with_options, nproc=4, mesh=Mesh(dp_replicate=2, dp_shard=-1)):
        for got in results:
            assert_close(got, want, TOLERANCE)


def _compile(net: Net) -> None:
    for block in net.blocks:
        block.compile(backend="aot_eager")


def _recompute(net: Net) -> None:
    for block in net.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _compiled_and_recomputed(job: Any) -> list[Trained]:
    return [_train(job, prepare=prepare) for prepare in (_compile, _recompute)]


@pytest.mark.ci
def test_compiled_blocks_and_activation_checkpointing_train_as_one_process() -> None:
    (want,) = run_ranks(_train, nproc=1)
    for results in run_ranks(_compiled_and_recomputed, nproc=2):
        for got in results:
            assert_close(got, want, TOLERANCE)


def _fill(layer: nn.Module) -> None:
    for p in layer.parameters(recurse=False):
        nn.init.normal_(p)
    for name, buffer in layer.named_buffers(recurse=False):
        setattr(layer, name, torch.full_like(buffer, 3.0))


class Scaled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()), persistent=False)


class InPlace(nn.Module):
    """Its `reset_parameters` writes to a parameter without `torch.no_grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))

    def reset_parameters(self) -> None:
        self.weight.fill_(1.0)


class Buffered(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("scale", torch.ones(()))


def _started_on_meta(job: Any) -> Any:
    with torch.device("meta"):
        net = Net()
        net.blocks.append(Scaled())
        net.last.weight = nn.Parameter(torch.empty(3, 7))
        net.first.extra = net.last.weight  # tied
    held = []

    def fill(layer: nn.Module) -> None:
        held.append(sum(local(p).numel() for p in net.parameters() if not p.is_meta))
        _fill(layer)

    model = paceline.fsdp(job, net, init=fill)
    assert net.first.extra is net.last.weight
    assert net.blocks[2].scale.item() == 3.0
    assert "blocks.2.scale" not in net.state_dict()
    whole = {name: _whole(value) for name, value in model.state_dict().items()}
    with torch.device("meta"):
        other = Net()
        other.in_place = InPlace()
    paceline.fsdp(job, other)
    assert not any(p.is_meta for p in other.parameters())
    return max(held), digest(whole)


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def test_a_module_on_the_meta_device_is_allocated_block_by_block() -> None:
    alone = run_ranks(_started_on_meta, nproc=1)[0]
    for nproc in (2, 3):
        for peak, weights in run_ranks(_started_on_meta, nproc=nproc):
            assert weights == alone[1]
            assert peak < 0.8 * alone[0]


def _half_precision(job: Any) -> list[tuple[float, float]]:
    model = paceline.fsdp(job, Net().float(), blocks=Block)
    data = make_data(24)
    training = make_training(job, model, data, global_batch=8, micro_batch=2, precision="fp16")
    seen = []
    for step in training.steps(until=4):
        step.run(lambda batch: loss_sum(model, batch), reduction="sum")
        before = _whole(next(model.parameters())).clone()
        if step.number == 2 and job.data.rank == 0:
            local(next(model.parameters()).grad)[0, 0] = torch.inf
        step.update()
        changed = not torch.equal(before, _whole(next(model.parameters())))
        seen.append((changed, training._context.precision.scaler.get_scale()))
    return seen


def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all() -> None:
    expected = [(True, 65536.0), (False, 32768.0), (True, 32768.0), (True, 32768.0)]
    for nproc in (2, 3):
        assert run_ranks(_half_precision, nproc=nproc) == [expected] * nproc


def _bf16_parameters(job: Any) -> tuple[set[torch.dtype], set[torch.dtype], list[float]]:
    model = paceline.fsdp(job, Net().float(), blocks=Block, param_dtype=torch.bfloat16)
    dtypes = set()
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: dtypes.add(inputs[0].dtype))
    training = make_training(job, model, make_data(24), global_batch=8, micro_batch=1)
    assert training._context.strategy.facts() == {"param_bytes": 2}
    found = train(training, lambda m, batch: loss_sum(m, batch).float(), until=3, clip_norm=1.0)
    return dtypes, {p.dtype for p in model.parameters()}, found.losses


@pytest.mark.ci
def test_the_gathered_parameters_may_have_another_dtype() -> None:
    (alone,) = run_ranks(_bf16_parameters, nproc=1)
    for mesh in (None, Mesh(tp=2)):
        for each in run_ranks(_bf16_parameters, nproc=2, mesh=mesh):
            assert each[:2] == ({torch.bfloat16}, {torch.float32})
            # All compute in bf16; the sums of gradients are in fp32.
            assert each[2] == pytest.approx(alone[2], rel=1e-6)


def _exported(job: Any, path: str) -> tuple[int, int]:
    """How many whole tensors there are, and how many this rank holds at once."""
    training = make_training(job, paceline.fsdp(job, Net()), make_data(4))
    strategy = training._context.strategy
    gathered = strategy.whole_state
    seen: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def watched(model: nn.Module) -> Iterator[tuple[str, Any]]:
        nonlocal most
        for name, value in gathered(model):
            seen.append(weakref.ref(value))
            most = max(most, sum(each() is not None for each in seen))
            yield name, value

    strategy.whole_state = watched  # type: ignore[method-assign]
    training.export(path)
    return len(seen), most


def test_only_rank_0_holds_the_whole_model_of_an_export(tmp_path: Path) -> None:
    (number, first), (_, second) = run_ranks(_exported, str(tmp_path / "weights.pth"), nproc=2)
    assert first == number == len(Net().state_dict())
    assert second <= 2  # the one before is freed after the next is gathered


def _compiled_names(job: Any) -> set[str]:
    model = torch.compile(paceline.fsdp(job, Net(), blocks=Block))
    training = make_training(job, model, make_data(4))
    return {name for name, _ in training._context.strategy.whole_state(model)}


@pytest.mark.ci
def test_a_compiled_model_is_exported_with_its_own_names() -> None:
    assert run_ranks(_compiled_names, nproc=2) == [set(Net().state_dict())] * 2


class Stream(IterableDataset[Any]):
    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in range(len(self.data)))


def _evaluated(job: Any) -> list[Any]:
    model = paceline.fsdp(job, Net(), blocks=Block)
    found = []
    for size, stream in ((7, False), (1, False), (5, True), (9, True)):
        data: Any = make_data(size, torch.float64)
        if stream:
            data = Stream(data)
        result = paceline.evaluate(
            job,
            model,
            data,
            lambda model, batch: {
                "loss": (loss_sum(model, batch), len(batch[1])),
                "out": model(batch[0]),
            },
            metrics={"out": "rows"},
            micro_batch=2,
        )
        rows = result.out[result.out[:, 0].argsort()]  # of a stream they come rank by rank
        found.append((result.num_samples, result.loss, digest(rows)))
    # torch keeps the root's parameters gathered after a forward without a backward.
    assert job.world_size == 1 or all(isinstance(p, DTensor) for p in model.parameters())
    return found


def test_evaluation_on_ranks_with_unequal_shares() -> None:
    alone = run_ranks(_evaluated, nproc=1)[0]
    for nproc in (2, 3, 4):
        assert run_ranks(_evaluated, nproc=nproc) == [alone] * nproc


def _with(change: Callable[[Any], Any]) -> Any:
    net = Net()
    change(net)
    return net


def _replaced(make: Callable[[], nn.Module]) -> Any:
    """A net whose second block is on the meta device."""
    with torch.device("meta"):
        return _with(lambda net: net.blocks.__setitem__(1, make()))


def _run_step(job: Any, net: Any, *, optimizer: Any = sgd, **options: Any) -> None:
    model = paceline.fsdp(job, net, blocks=["blocks.*"])
    train(
        make_training(job, model, make_data(8, torch.float64), optimizer=optimizer, **options),
        until=1,
    )


def _early(job: Any) -> None:
    net = Net()
    optimizer = sgd(net.parameters())
    _run_step(job, net, optimizer=lambda _: optimizer)


def _tie(net: Any) -> None:
    net.blocks[1].inner.weight = net.blocks[0].inner.weight


WRONG: dict[str, Callable[[Any], Any]] = {
    "compiled": lambda job: paceline.fsdp(job, torch.compile(Net())),
    "blocks": lambda job: paceline.fsdp(job, Net(), blocks="layers.*"),
    "early": _early,
    "tied": lambda job: paceline.fsdp(job, _with(_tie)),
    "init": lambda job: paceline.fsdp(job, Net(), init=_fill),
    "offload": lambda job: paceline.fsdp(job, Net(), cpu_offload=True),
    "meta": lambda job: paceline.fsdp(job, _replaced(Scaled)),
    "unfilled": lambda job: paceline.fsdp(job, _replaced(Buffered)),
    "unfilled by init": lambda job: paceline.fsdp(
        job, _replaced(lambda: nn.Linear(7, 7)), init=lambda layer: None
    ),
    "ddp": lambda job: paceline.ddp(job, Net()),
    "exact": lambda job: _run_step(job, Net(), reproducible=True),
    "unused": lambda job: _run_step(
        job, _with(lambda net: setattr(net, "extra", nn.Linear(1, 1).double()))
    ),
    "twice": lambda job: paceline.fsdp(job, paceline.fsdp(job, Net())),
    "torch": lambda job: paceline.fsdp(job, fully_shard(Net())),
    "then ddp": lambda job: paceline.ddp(job, paceline.fsdp(job, Net())),
    "after ddp": lambda job: paceline.fsdp(job, nn.parallel.DistributedDataParallel(Net())),
}


def _wrong(job: Any, kind: str) -> None:
    WRONG[kind](job)


@pytest.mark.ci
def test_wrong_use_is_refused_on_all_ranks() -> None:
    ranks = run_ranks(refusals, _wrong, list(WRONG), nproc=2, mesh=Mesh(dp_shard=2))
    check_messages("fsdp", ranks)


def _only_replicated(job: Any) -> list[str]:
    paceline.fsdp(job, Net(), blocks=Block)
    return [text for text in log._shown if "fsdp" in text]


def test_a_mesh_that_shards_nothing_is_a_warning() -> None:
    (warning,), others = run_ranks(_only_replicated, nproc=2, mesh=Mesh(dp_replicate=2))
    assert warning.startswith("fsdp shards nothing: the mesh is dp_replicate=2")
    assert not others
