"""A sharded model trains like one process, with ragged steps, empty ranks, clipping, saving and resuming."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainings import loss_sum, make_data, refusals
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import IterableDataset, TensorDataset

import paceline
from paceline import Mesh, log
from paceline.parallel.modules import local
from paceline.testing import digest, run_ranks

Result = tuple[list[float], list[float], dict[str, torch.Tensor]]


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


def _training(
    job: Any, folder: str | None, *, count: str = "samples", **options: Any
) -> paceline.Training:
    net = Net()
    options.pop("prepare", lambda _: None)(net)
    with torch.no_grad():
        net.last.bias.add_(job.rank)  # ranks begin with the weights of rank 0
    model = paceline.fsdp(job, net, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # 26 samples in steps of 8 and micro-batches of at most 1: the last step has 2, so that some of 4 ranks
    # have none.
    batches = paceline.Batches(job, make_data(26, torch.float64), global_batch=8, micro_batch=1)
    checkpoints = paceline.Checkpoints(folder, every_steps=2) if folder else None
    return paceline.Training(job, model, optimizer, batches, count=count, checkpoints=checkpoints)


def _train(
    job: Any, folder: str | None, until: int, count: str, export: str | None, **options: Any
) -> Result:
    training = _training(job, folder, count=count, **options)
    model = training.models[0]
    sharded = all(isinstance(p, DTensor) for p in model.parameters())
    assert sharded == (job.world_size > 1)
    losses, norms = [], []
    for step in training.steps(until=until):
        step.run(lambda batch: (loss_sum(model, batch), len(batch[1])), reduction="sum")
        step.update(clip_norm=0.5)
        losses.append(float(step.loss))
        norms.append(float(step.grad_norm))
    if export is not None:
        training.export(export)
    whole = dict(training._context.strategy.whole_state(model))
    return losses, norms, {name: value.clone() for name, value in whole.items()}


def _assert_close(got: Result, want: Result) -> None:
    # float64: sums of at most 8 gradients in another order, over 8 steps of AdamW.
    assert got[0] == pytest.approx(want[0], rel=1e-9)
    assert got[1] == pytest.approx(want[1], rel=1e-9)
    for name, value in want[2].items():
        torch.testing.assert_close(got[2][name], value, rtol=1e-8, atol=1e-10)


def test_it_trains_as_one_process_and_resumes_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    want = run_ranks(_train, None, 8, "samples", None, nproc=1)[0]
    for nproc in (2, 4):
        for got in run_ranks(
            _train, None, 8, "samples", str(tmp_path / f"{nproc}.pth"), nproc=nproc
        ):
            _assert_close(got, want)
        saved = torch.load(tmp_path / f"{nproc}.pth")
        torch.testing.assert_close(saved, want[2], rtol=1e-8, atol=1e-10)
    folder = str(tmp_path / "run")
    run_ranks(_train, folder, 3, "samples", None, nproc=4)
    resumed = run_ranks(_train, folder, 5, "samples", None, nproc=2)[0]
    assert resumed[0] == pytest.approx(want[0][3:5], rel=1e-9)
    last = run_ranks(_train, folder, 8, "samples", None, nproc=1)[0]
    _assert_close((want[0][:5] + last[0], want[1][:5] + last[1], last[2]), want)


OPTIONS: list[dict[str, Any]] = [
    {"blocks": "blocks.*", "reshard_after_forward": False},
    {"blocks": [Block, "first"]},
]


def _with_options(job: Any, folder: str) -> list[Result]:
    return [
        _train(job, None, 5, "samples", None),
        *(_train(job, None, 5, "samples", None, **each) for each in OPTIONS),
        _train(job, folder, 4, "tokens", None),
    ]


@pytest.mark.ci
def test_hybrid_sharding_and_options_train_as_one_process(tmp_path: Path) -> None:
    want = run_ranks(_train, None, 8, "samples", None, nproc=1)[0]
    short = run_ranks(_train, None, 5, "samples", None, nproc=1)[0]
    folder = str(tmp_path / "run")
    hybrid = Mesh(dp_replicate=2, dp_shard=-1)
    for *same, tokens in run_ranks(_with_options, folder, nproc=4, mesh=hybrid):
        for got in same:
            _assert_close(got, short)
        assert tokens[0] == pytest.approx(want[0][:4], rel=1e-9)
    # The tokens are the samples, so another mesh, and none, continue with the same losses.
    whole = run_ranks(_train, folder, 6, "tokens", None, nproc=3, mesh=Mesh(dp_shard=3))[0]
    assert whole[0] == pytest.approx(want[0][4:6], rel=1e-9)
    alone = run_ranks(_train, folder, 8, "tokens", None, nproc=1)[0]
    assert alone[0] == pytest.approx(want[0][6:], rel=1e-9)


def _compile(net: Net) -> None:
    for block in net.blocks:
        block.compile(backend="aot_eager")


def _recompute(net: Net) -> None:
    for block in net.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _compiled_and_recomputed(job: Any) -> list[Result]:
    return [
        _train(job, None, 5, "samples", None, prepare=prepare) for prepare in (_compile, _recompute)
    ]


@pytest.mark.ci
def test_compiled_blocks_and_activation_checkpointing_train_as_one_process() -> None:
    want = run_ranks(_train, None, 5, "samples", None, nproc=1)[0]
    for results in run_ranks(_compiled_and_recomputed, nproc=2):
        for got in results:
            _assert_close(got, want)


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
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batches = paceline.Batches(job, make_data(24), global_batch=8, micro_batch=2)
    training = paceline.Training(job, model, optimizer, batches, precision="fp16")
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


def _bf16_parameters(
    job: Any, until: int, folder: str | None = None
) -> tuple[set[torch.dtype], set[torch.dtype], list[float]]:
    model = paceline.fsdp(job, Net().float(), blocks=Block, param_dtype=torch.bfloat16)
    dtypes = set()
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: dtypes.add(inputs[0].dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batches = paceline.Batches(job, make_data(24), global_batch=8, micro_batch=1)
    checkpoints = paceline.Checkpoints(folder) if folder else None
    training = paceline.Training(job, model, optimizer, batches, checkpoints=checkpoints)
    losses = []
    for step in training.steps(until=until):
        step.run(lambda batch: loss_sum(model, batch).float(), reduction="sum")
        step.update(clip_norm=1.0)
        losses.append(float(step.loss))
    return dtypes, {p.dtype for p in model.parameters()}, losses


@pytest.mark.ci
def test_the_gathered_parameters_may_have_another_dtype(tmp_path: Path) -> None:
    alone = run_ranks(_bf16_parameters, 3, nproc=1)[0]
    both = run_ranks(_bf16_parameters, 3, nproc=2)
    assert both[0] == both[1]
    for each in (alone, both[0], *run_ranks(_bf16_parameters, 3, nproc=2, mesh=Mesh(tp=2))):
        assert each[:2] == ({torch.bfloat16}, {torch.float32})
        # All compute in bf16; the sums of gradients are in fp32.
        assert each[2] == pytest.approx(alone[2], rel=1e-6)
    folder = str(tmp_path / "run")
    run_ranks(_bf16_parameters, 1, folder, nproc=1)
    run_ranks(_bf16_parameters, 2, folder, nproc=2)
    _, _, last = run_ranks(_bf16_parameters, 3, folder, nproc=1)[0]
    assert last == pytest.approx(alone[2][2:], rel=1e-6)


def _exported(job: Any, path: str) -> tuple[int, int]:
    """How many whole tensors there are, and how many this rank holds at once."""
    training = _training(job, None)
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = paceline.Training(
        job, model, optimizer, paceline.Batches(job, make_data(4), global_batch=2)
    )
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
            lambda model, batch: {"loss": loss_sum(model, batch), "out": model(batch[0])},
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


@pytest.mark.slow
def test_tokens_and_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    want = run_ranks(_train, None, 5, "tokens", None, nproc=1)[0]
    monkeypatch.setenv("PACELINE_BACKEND", "gloo")
    for got in run_ranks(_train, None, 5, "tokens", None, nproc=3):
        _assert_close(got, want)


def _resumed_bits(job: Any, folder: str, until: int) -> list[bytes]:
    _, _, whole = _train(job, folder, until, "samples", None)
    return [value.numpy().tobytes() for value in whole.values()]


@pytest.mark.ci
def test_a_resumed_training_is_bit_equal_to_a_straight_one(tmp_path: Path) -> None:
    straight = run_ranks(_resumed_bits, str(tmp_path / "a"), 6, nproc=2)
    run_ranks(_resumed_bits, str(tmp_path / "b"), 3, nproc=2)
    assert run_ranks(_resumed_bits, str(tmp_path / "b"), 6, nproc=2) == straight


WRONG = {
    "compiled": "layer.compile() before paceline.fsdp",
    "blocks": "'layers.*' matches no submodule",
    "early": "make the optimizer after paceline.fsdp",
    "tied": "blocks.0.inner.weight and blocks.1.inner.weight are one parameter",
    "init": "init has no effect",
    "offload": "cpu_offload has no effect",
    "meta": "blocks.1 (Scaled) is on the meta device and has no `reset_parameters`",
    "unfilled": "`reset_parameters` does not fill 'scale' of Buffered",
    "unfilled by init": "`init` does not fill 'weight' of Linear",
    "ddp": "ddp keeps the whole model on each rank, but the mesh is dp_shard=2",
    "exact": "reproducible",
    "unused": "no gradient reached extra.weight, extra.bias",
}

WRAPPED = {
    "twice": "this module is wrapped by paceline.fsdp already",
    "torch": "this module is sharded by torch's fully_shard already",
    "then ddp": "fix:   leave paceline.ddp out, or paceline.fsdp. Replicas of a sharded model: paceline.fsdp "
    "with Mesh(dp_replicate=2, dp_shard=-1).",
    "after ddp": "this module is wrapped by paceline.ddp already",
}


def _refused(job: Any, kind: str) -> None:
    net = Net()
    early = torch.optim.SGD(net.parameters(), lr=0.1)
    if kind == "unused":
        net.extra = nn.Linear(1, 1).double()
    if kind == "tied":
        net.blocks[1].inner.weight = net.blocks[0].inner.weight
    if kind == "meta":
        with torch.device("meta"):
            net.blocks[1] = Scaled()
    if kind == "unfilled":
        with torch.device("meta"):
            net.blocks[1] = Buffered()
    if kind == "unfilled by init":
        with torch.device("meta"):
            net.blocks[1] = nn.Linear(7, 7)
    if kind == "ddp":
        paceline.ddp(job, net)
    if kind == "compiled":
        net = torch.compile(net)  # type: ignore[assignment]
    if kind == "torch":
        fully_shard(net)
    if kind == "after ddp":
        net = nn.parallel.DistributedDataParallel(net)  # type: ignore[assignment]
    options: dict[str, Any] = {
        "init": {"init": _fill},
        "unfilled by init": {"init": lambda layer: None},
        "offload": {"cpu_offload": True},
    }.get(kind, {})
    blocks = "layers.*" if kind == "blocks" else ["blocks.*"]
    model = paceline.fsdp(job, net, blocks=blocks, **options)
    if kind == "twice":
        paceline.fsdp(job, model, blocks=Block)
    if kind == "then ddp":
        paceline.ddp(job, model)
    optimizer = early if kind == "early" else torch.optim.SGD(model.parameters(), lr=0.1)
    data = make_data(8, torch.float64)
    batches = paceline.Batches(job, data, global_batch=4)
    training = paceline.Training(job, model, optimizer, batches, reproducible=kind == "exact")
    for step in training.steps(until=1):
        step.run(lambda batch: loss_sum(model, batch), reduction="sum")
        step.update()


@pytest.mark.ci
def test_wrong_use_is_refused_on_all_ranks() -> None:
    for found in run_ranks(refusals, _refused, list(WRONG), nproc=2, mesh=Mesh(dp_shard=2)):
        assert all(text in found[kind][1] for kind, text in WRONG.items()), found


def test_a_module_that_is_wrapped_already_is_refused_on_all_ranks() -> None:
    for found in run_ranks(refusals, _refused, list(WRAPPED), nproc=2, mesh=Mesh(dp_shard=2)):
        assert all(text in found[kind][1] for kind, text in WRAPPED.items()), found


def _only_replicated(job: Any) -> list[str]:
    paceline.fsdp(job, Net(), blocks=Block)
    return [text for text in log._shown if "fsdp" in text]


def test_a_mesh_that_shards_nothing_is_a_warning() -> None:
    (warning,), others = run_ranks(_only_replicated, nproc=2, mesh=Mesh(dp_replicate=2))
    assert warning.startswith("fsdp shards nothing: the mesh is dp_replicate=2")
    assert not others
