"""`load_weights` reads shards of files into models of every layout, or refuses on all ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from small_gpt import GPT, Block, make_tokens, token_loss
from small_trainings import check_messages, make_training, refusals, train
from torch import nn

import paceline
from paceline import Mesh
from paceline.checkpoint.export import write_shards
from paceline.checkpoint.weights import open_weights
from paceline.parallel.modules import is_split, whole
from paceline.testing import run_ranks

FAST = [Mesh(dp_shard=3), Mesh(tp=2, dp_shard=2)]
SLOW = [
    Mesh(),
    Mesh(dp_replicate=2),
    Mesh(dp_shard=2),
    Mesh(dp_shard=4),
    Mesh(tp=2),
    Mesh(dp_replicate=2, dp_shard=2),
]


def _tied_gpt() -> GPT:
    model = GPT()
    model.head.weight = model.tokens.weight
    return model


def _write(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a model in all forms: safetensors shards, one file, `torch.save`, DCP, a checkpoint."""
    state = {
        name: torch.randn(value.shape, generator=torch.Generator().manual_seed(n))
        for n, (name, value) in enumerate(_tied_gpt().state_dict().items())
    }
    del state["head.weight"]  # as `save_pretrained` leaves it out
    state["norm.bias"] = state["norm.bias"].bfloat16()
    names = sorted(state)
    shards = {f"model-{n}.safetensors": names[n::3] for n in range(3)}
    (folder / "hub").mkdir()
    for file, held in shards.items():
        save_file({name: state[name] for name in held}, folder / "hub" / file)
    save_file({"norm.bias": torch.ones(3)}, folder / "hub/other.safetensors")  # not in the index
    weight_map = {name: file for file, held in shards.items() for name in held}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "hub/model.safetensors.index.json").write_text(json.dumps(index))
    save_file({f"module.{k}": v for k, v in state.items()}, folder / "one.safetensors")
    torch.save({"model": state, "step": 7}, folder / "w.pth")
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"model": state, "step": 7}, checkpoint_id=folder / "dcp", no_dist=True)
    full = {**state, "head.weight": state["tokens.weight"]}
    with paceline.join() as job:
        paceline.Checkpoints(folder / "run").save(job, 3, {"models": [full]})
    return full


def _layout(job: Any, *, meta: bool) -> Any:
    mesh = job.mesh
    with torch.device("meta" if meta else "cpu"):
        model: Any = _tied_gpt()
    if mesh.tp > 1:
        model = paceline.tensor_parallel(job, model)
    if mesh.tp > 1 and mesh.dp_shard > 1 and meta:
        with pytest.raises(paceline.ConfigError, match="cannot be initialised"):
            paceline.fsdp(job, model, blocks=Block)
    if mesh.dp_shard > 1 or job.world_size == 1:
        return paceline.fsdp(job, model, blocks=Block, init="later" if meta else None)
    return model


def _loaded(job: Any, folder: str) -> list[float]:
    wanted = torch.load(f"{folder}/wanted", weights_only=True)
    for path in ("one.safetensors", "w.pth", "dcp", "run", "run/step-3", "hub"):
        for meta in (False, True):
            model = _layout(job, meta=meta)
            paceline.load_weights(model, f"{folder}/{path}")
            found = {name: whole(value) for name, value in model.state_dict().items()}
            assert set(found) == set(wanted)
            for name, value in found.items():
                assert value.dtype == torch.float32
                assert torch.equal(value, wanted[name].float()), (path, meta, name)
            assert model.head.weight is model.tokens.weight
    if not is_split(model):
        model = paceline.ddp(job, model)
    training = make_training(job, model, make_tokens(12), count="tokens")
    return train(training, token_loss, until=2).losses


@pytest.mark.parametrize(
    "mesh", [*FAST, *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in SLOW)], ids=str
)
def test_every_layout_gets_the_weights_of_every_form(mesh: Mesh, tmp_path: Path) -> None:
    torch.save(_write(tmp_path), tmp_path / "wanted")
    nproc = mesh.data_size * mesh.tp * mesh.pp
    losses = run_ranks(_loaded, str(tmp_path), nproc=nproc, mesh=mesh)
    assert losses == [losses[0]] * nproc
    assert losses[0][1] < losses[0][0]


def _stage(job: Any, folder: str, schedule: str) -> int:
    wanted = torch.load(f"{folder}/wanted", weights_only=True)
    losses = []
    for meta in (False, True):
        with torch.device("meta" if meta else "cpu"):
            model: Any = GPT(layers=4)
        model = paceline.pipeline(job, model, schedule=schedule)
        if job.mesh.tp > 1:
            model = paceline.tensor_parallel(job, model)
        if job.mesh.dp_shard > 1:
            model = paceline.fsdp(job, model, blocks=Block, init="later" if meta else None)
        with pytest.raises(paceline.CheckpointError, match=r"tokens\.weight: the model has"):
            paceline.load_weights(
                model, f"{folder}/w", rename=lambda name: name.replace("tokens.weight", "tokens")
            )
        paceline.load_weights(model, f"{folder}/w")
        own = dict(model.named_parameters())
        for name, p in own.items():
            assert torch.equal(whole(p), wanted[name]), (meta, name)
        training = make_training(job, model, make_tokens(12), count="tokens")
        losses.append(train(training, token_loss, until=2).losses)
    assert losses[0] == losses[1]
    model.double()  # other ranks know the dtype of before
    training.export(f"{folder}/exported")
    exported = torch.load(f"{folder}/exported", weights_only=True)
    for name, p in own.items():
        assert torch.equal(whole(p).float(), exported[name])
    return len(own)


@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [
        (Mesh(pp=2), "interleaved"),
        pytest.param(Mesh(pp=2, dp_shard=2), "1f1b", marks=pytest.mark.slow),
        pytest.param(Mesh(pp=2, dp_shard=2), "interleaved", marks=pytest.mark.slow),
        pytest.param(Mesh(pp=2, tp=2), "1f1b", marks=pytest.mark.slow),
        pytest.param(Mesh(pp=2, tp=2, dp_shard=2), "1f1b", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_stage_reads_its_own_layers(mesh: Mesh, schedule: str, tmp_path: Path) -> None:
    wanted = dict(GPT(layers=4).state_dict())
    torch.save(wanted, tmp_path / "wanted")
    write_shards(tmp_path / "w", open_weights(tmp_path / "wanted"), 4000)
    nproc = mesh.data_size * mesh.tp * mesh.pp
    numbers = run_ranks(_stage, str(tmp_path), schedule, nproc=nproc, mesh=mesh)
    assert sum(numbers) == len(wanted) * nproc / mesh.pp


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def _folder(name: str, state: dict[str, torch.Tensor], **weight_map: str) -> Path:
    folder = Path(name)
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "a.safetensors")
    index = {"weight_map": {**dict.fromkeys(state, "a.safetensors"), **weight_map}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _write_wrong() -> None:
    state = _net().state_dict()
    _folder("good", state)
    _folder("lacks", {k: v for k, v in state.items() if k != "2.bias"})
    _folder("shape", {**state, "2.bias": torch.ones(3)})
    _folder("more", {**state, "3.bias": torch.ones(3)})
    _folder("absent", state, extra="b.safetensors")
    (_folder("no index", state) / "model.safetensors.index.json").write_text("[]")
    for name in ("short", "text"):
        file = _folder(name, state) / "a.safetensors"
        file.write_bytes(file.read_bytes()[:-8] if name == "short" else b"hello")
    Path("empty").mkdir()
    with paceline.join() as job:
        for rank in range(2):
            paceline.Checkpoints(f"run{rank}").save(job, 5 + rank, {"models": [state]})
    names = ("0.0.weight", "0.1.weight")
    values = torch.ones(4, 4)
    torch.save({name: values.clone() for name in names}, "equal.pth")
    values[3] = 0  # in the shard of the last rank
    torch.save({names[0]: torch.ones(4, 4), names[1]: values}, "untied.pth")
    lacks = {k: v for k, v in state.items() if k != "2.bias"}
    for folder, saved in (("dcp", lacks), ("dcp whole", state)):
        with pytest.warns(UserWarning, match="torch.distributed is disabled"):
            dcp.save({"model": saved}, checkpoint_id=folder, no_dist=True)
    shutil.copytree("dcp whole", "dcp file")
    Path("dcp file/__0_0.distcp").unlink()


_WRONG = [
    "lacks",
    "shape",
    "more",
    "absent",
    "no index",
    "short",
    "text",
    "empty",
    "dcp",
    "dcp file",
]


def _refused(job: Any, kind: str) -> None:
    with torch.device("meta"):
        net = _net()
    model = paceline.fsdp(job, net, init="later")
    options: dict[str, Any] = {}
    if kind == "rename":
        options["rename"] = lambda name: name.replace("2.bias", "0.bias")
    if kind == "buffer":
        with torch.device("meta"):
            model.register_buffer("angles", torch.ones(3), persistent=False)
    try:
        if kind == "unfilled":
            make_training(job, model, make_tokens(4))
        paceline.load_weights(model, kind if kind in _WRONG else "good", **options)
    finally:
        assert all(p.is_meta for p in model.parameters())


def _refusals(job: Any) -> list[Any]:
    found = refusals(job, _refused, [*_WRONG, "rename", "buffer", "unfilled"])
    found |= refusals(
        job, lambda job, kind: paceline.load_weights(_net(), f"run{job.rank}"), ["steps"]
    )
    block = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    block[1].weight = block[0].weight
    tied = paceline.fsdp(job, nn.Sequential(block), blocks="0")
    paceline.load_weights(tied, "equal.pth")
    assert torch.equal(whole(block[1].weight), torch.ones(4, 4))
    with pytest.raises(paceline.CheckpointError) as untied:
        paceline.load_weights(tied, "untied.pth")
    with torch.device("meta"):
        model = paceline.fsdp(job, _net(), init="later")
    with pytest.raises(paceline.CheckpointError) as raised:
        paceline.load_weights(model, "text" if job.rank == 1 else "good")
    with pytest.raises(paceline.CheckpointError, match=r"__0_0\.distcp"):
        paceline.load_weights(model, "dcp file" if job.rank == 1 else "dcp whole")
    skipped = {"3.bias": None}
    paceline.load_weights(model, "more", rename=lambda name: skipped.get(name, name))
    assert not any(p.is_meta for p in model.parameters())
    return [found, str(raised.value), str(untied.value)]


def test_wrong_files_are_refused_on_all_ranks_before_a_tensor_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _write_wrong()
    ranks = run_ranks(_refusals, nproc=2, mesh=Mesh(dp_shard=2))
    for found, text, untied in ranks:
        assert "0.0.weight and 0.1.weight have different values" in untied
        for kind in ("short", "text"):  # with what safetensors says
            assert f"{kind}/a.safetensors cannot be read" in found.pop(kind)[1]
        assert "text/a.safetensors cannot be read" in text
    check_messages("weights", [found for found, *_ in ranks])
    assert ranks[0][1].startswith("on rank 1: ")


class _Model(nn.Module):
    """An embedding and layers, as a language model has them."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(4 * width, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width))
            for _ in range(layers)
        )


def _memory(field: str) -> int:
    (line,) = (row for row in Path("/proc/self/status").read_text().splitlines() if field in row)
    return 1024 * int(line.split()[1])


def _touched_bytes(path: str) -> int:
    """Bytes of a mapped file that this process has read: the pages that are in its memory."""
    rows = Path("/proc/self/smaps").read_text().splitlines()
    starts = [i for i, row in enumerate(rows) if row.endswith(path)]
    found = [next(row for row in rows[i:] if row.startswith("Rss:")) for i in starts]
    return sum(1024 * int(row.split()[1]) for row in found)


def _cost(job: Any, folder: str, width: int, layers: int) -> tuple[int, int]:
    """Bytes of the files that were read, and growth of memory at the peak, both of `load_weights` alone."""
    read = 0

    class Slice:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getitem__(self, box: Any) -> torch.Tensor:
            found: torch.Tensor = self.inner[box]
            found.sum()  # reads the pages, as the copy does
            return found

    class Opened:
        def __init__(self, file: str, framework: str) -> None:
            self.file, self.inner = file, safe_open(file, framework=framework)

        def __enter__(self) -> Any:
            self.inner.__enter__()
            return self

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def get_slice(self, key: str) -> Any:
            return Slice(self.inner.get_slice(key))

        def __exit__(self, *error: Any) -> None:
            nonlocal read
            read += _touched_bytes(self.file)
            self.inner.__exit__(*error)

    with torch.device("meta"):
        model = _Model(width, layers)
    model = paceline.fsdp(job, model, blocks="layers.*", init="later")
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before = _memory("VmRSS")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("safetensors.safe_open", Opened)
        paceline.load_weights(model, folder)
    return read, _memory("VmHWM") - before


@pytest.mark.slow
def test_a_rank_reads_its_share_and_needs_memory_for_it(tmp_path: Path) -> None:
    width, layers = 2048, 7  # 1 GB
    state = _Model(width, layers).state_dict()
    size = sum(value.nbytes for value in state.values())
    torch.save(state, tmp_path / "w.pth")
    write_shards(tmp_path / "hub", open_weights(tmp_path / "w.pth"), size // 4)
    del state
    costs = run_ranks(_cost, str(tmp_path / "hub"), width, layers, nproc=4, mesh=Mesh(dp_shard=4))
    print(f"{size:,} bytes of files:", costs)
    for read, memory in costs:
        assert 0.24 * size < read < 0.35 * size
        assert 0.24 * size < memory < 0.35 * size
