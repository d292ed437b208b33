"""A `DataLoader` given to `Batches` or `evaluate`: the same samples on any ranks and after a resume."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from paceline.data.batches import Batches
from paceline.data.evaluation import EvaluationBatches
from paceline.data.plan import Position
from paceline.errors import ConfigError, DataError, RankDisagreement
from paceline.job.job import Job
from paceline.testing import run_failing_ranks, run_ranks

SIZE = 23


class Augmented(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).item()


class Lengths(Sampler[list[int]]):
    """Batches of samples of similar length, in an order from the global generator of `random`."""

    def __iter__(self) -> Iterator[list[int]]:
        buckets = [list(range(at, min(at + 4, SIZE))) for at in range(0, SIZE, 4)]
        random.shuffle(buckets)
        return iter(buckets)

    def __len__(self) -> int:
        return (SIZE + 3) // 4


class Stateful(Sampler[int]):
    """Draws from a generator of its own, which goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.random = random.Random(5)

    def __iter__(self) -> Iterator[int]:
        order = list(range(SIZE))
        self.random.shuffle(order)
        return iter(order)


class SetEpoch(Sampler[int]):
    """Draws from its seed and the epoch, as `DistributedSampler` does."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(range(SIZE), SIZE))


class Batched:
    """Batches that are no lists, as `torch.randperm(n).split(size)` gives them."""

    def __init__(self, split: Callable[[torch.Tensor, int], Any]) -> None:
        self.split = split

    def __iter__(self) -> Iterator[Any]:
        return iter(self.split(torch.randperm(SIZE), 4))


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(11)


DATA = Augmented()
WEIGHTS = [1.0 + index % 3 for index in range(SIZE)]
SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffle": lambda: {"shuffle": True},
    "in order": lambda: {"sampler": SequentialSampler(DATA)},
    "distributed": lambda: {"sampler": DistributedSampler(DATA, num_replicas=2, rank=1)},
    "generator": lambda: {"shuffle": True, "generator": _seeded()},
    "replacement": lambda: {"sampler": RandomSampler(DATA, replacement=True, num_samples=17)},
    "tensors": lambda: {"batch_sampler": Batched(torch.split)},
    "arrays": lambda: {
        "batch_sampler": Batched(lambda ids, size: [i.numpy() for i in ids.split(size)])
    },
    "weighted": lambda: {"sampler": WeightedRandomSampler(WEIGHTS, 30, generator=_seeded())},
    "subset": lambda: {"sampler": SubsetRandomSampler([3, 1, 4, 15, 9, 2, 6])},
    "lengths": lambda: {"batch_sampler": Lengths()},
    "set_epoch": lambda: {"sampler": SetEpoch()},
}


def _loader(name: str, workers: int = 0) -> DataLoader[Any]:
    options = SAMPLERS[name]()
    if "batch_sampler" not in options:
        options["batch_size"] = 3
    return DataLoader(DATA, num_workers=workers, **options)


def _rows(job: Job, name: str, workers: int, start: Position, epochs: int = 3) -> list[Any]:
    """Of each step: its position and the samples of this rank."""
    with pytest.MonkeyPatch.context() as patch:
        # Nothing may depend on the state of the global generators of one rank.
        patch.setattr(random, "_inst", random.Random(job.rank), raising=False)
        torch.manual_seed(job.rank)
        batches = Batches(job, _loader(name, workers), global_batch=8)
        steps = []
        for step in batches.iterate(start, epochs=epochs):
            rows = [
                row for m in step for row in zip(*map(torch.Tensor.tolist, m.batch), strict=True)
            ]
            steps.append(((step.epoch, step.offset), rows))
        batches.close()
    return steps


def _all_rows(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = {name: _rows(job, name, 0, Position(7)) for name in SAMPLERS}
    for name in ("shuffle", "weighted"):
        found[f"{name} workers"] = _rows(job, name, 2, Position(7))
    for name in SAMPLERS:
        found[f"{name} resumed"] = _rows(job, name, 0, Position(7, 2, 4))
    return found


def _joined(ranks: list[dict[str, Any]], name: str) -> list[Any]:
    steps = zip(*(rank[name] for rank in ranks), strict=True)
    return [(step[0][0], [row for _, rows in step for row in rows]) for step in steps]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    ranks = run_ranks(_all_rows, nproc=1)
    return {name: _joined(ranks, name) for name in ranks[0]}


def test_one_process_gives_the_order_of_the_sampler(alone: dict[str, Any]) -> None:
    ids = {
        name: [
            [row[0] for (at, _), rows in steps if at == epoch for row in rows]
            for epoch in (0, 1, 2)
        ]
        for name, steps in alone.items()
    }
    assert ids["tensors"] == ids["arrays"]
    for name in ("tensors", "shuffle", "distributed", "generator", "lengths", "set_epoch"):
        assert all(sorted(epoch) == list(range(SIZE)) for epoch in ids[name])
        assert ids[name][0] != ids[name][1] != ids[name][2]
    assert ids["in order"] == [list(range(SIZE))] * 3
    assert ids["shuffle"] == ids["distributed"] != ids["generator"]
    assert [len(epoch) for epoch in ids["replacement"] + ids["weighted"]] == [17] * 3 + [30] * 3
    assert all(sorted(epoch) == [1, 2, 3, 4, 6, 9, 15] for epoch in ids["subset"])
    assert ids["set_epoch"] == [random.Random(at).sample(range(SIZE), SIZE) for at in range(3)]
    # A sample that is drawn twice in an epoch is augmented anew.
    drawn = [row for (epoch, _), rows in alone["weighted"] if epoch == 0 for row in rows]
    assert len({row[0] for row in drawn}) < len(set(drawn)) == 30


def test_workers_and_a_resume_change_nothing(alone: dict[str, Any]) -> None:
    for name in ("shuffle", "weighted"):
        assert alone[f"{name} workers"] == alone[name]
    for name in SAMPLERS:
        rest = [row for (epoch, _), rows in alone[name] if epoch == 2 for row in rows][4:]
        assert [row for _, rows in alone[f"{name} resumed"] for row in rows] == rest


@pytest.mark.parametrize("nproc", [2, 3])
def test_steps_hold_the_same_samples_on_any_ranks(alone: dict[str, Any], nproc: int) -> None:
    ranks = run_ranks(_all_rows, nproc=nproc)
    for name, steps in alone.items():
        assert _joined(ranks, name) == steps, name


def _settings(job: Job) -> Any:
    opened: list[Any] = []

    def drop_nothing(samples: list[Any]) -> Any:
        return [index for index, _ in samples]

    derived = Batches(job, DataLoader(DATA, batch_size=4, collate_fn=drop_nothing))
    micros = [m.batch for step in derived.iterate(Position(7), epochs=1) for m in step]
    tensors = Batches(job, DataLoader(TensorDataset(torch.arange(10)), 4), global_batch=8)
    plain = Batches(job, TensorDataset(torch.arange(10)), global_batch=8, shuffle=False)
    for one, other in zip(
        *(b.iterate(Position(7), epochs=1) for b in (tensors, plain)), strict=True
    ):
        opened += [torch.equal(a.batch[0], b.batch[0]) for a, b in zip(one, other, strict=True)]
    longest = Batches(job, DataLoader(DATA, batch_sampler=Lengths()), global_batch=8)
    return derived.global_batch, derived.micro_batch, micros, longest.micro_batch, all(opened)


def test_settings_come_from_the_loader() -> None:
    for nproc in (1, 2):
        for global_batch, micro_batch, micros, longest, same in run_ranks(_settings, nproc=nproc):
            assert (global_batch, micro_batch, longest) == (4 * nproc, 4 * nproc, 8)
            assert same
            assert all(type(batch) is list for batch in micros)
            assert max(len(batch) for batch in micros) == 4


class Numbers(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.size))


def _dropped(job: Job) -> dict[str, Any]:
    """The samples of this rank in each step, by how the last step is dropped, in three epochs."""
    found: dict[str, Any] = {}
    order = TensorDataset(torch.arange(SIZE))
    sampler = WeightedRandomSampler([1.0] * SIZE, 30)
    makes: dict[str, Callable[[], Batches]] = {
        "argument": lambda: Batches(job, order, global_batch=6, drop_last=True),
        "workers": lambda: Batches(job, order, global_batch=6, drop_last=True, workers=2),
        "loader": lambda: Batches(
            job, DataLoader(order, 2, shuffle=True, drop_last=True), global_batch=6
        ),
        "sampler": lambda: Batches(
            job, DataLoader(order, 2, sampler=sampler, drop_last=True), global_batch=7
        ),
        "divides": lambda: Batches(job, TensorDataset(torch.arange(24)), global_batch=6),
        "stream": lambda: Batches(job, Numbers(SIZE), global_batch=6, drop_last=True),
        "stream workers": lambda: Batches(
            job, Numbers(SIZE), global_batch=6, drop_last=True, workers=2
        ),
    }
    for name, make in makes.items():
        for kind, start in (("", Position(7)), (" resumed", Position(7, 1, 12))):
            batches = make()
            found[name + kind] = [
                (
                    (step.epoch, step.offset, step.num_samples, step.ends_epoch),
                    step.next_position,
                    [
                        row
                        for m in step
                        for row in (m.batch[0] if type(m.batch) is list else m.batch)
                    ],
                )
                for step in batches.iterate(start, epochs=3)
            ]
            batches.close()
    return found


@pytest.mark.parametrize("nproc", [1, 3])
def test_a_smaller_last_step_is_dropped(nproc: int) -> None:
    ranks = run_ranks(_dropped, nproc=nproc)
    for name in ("argument", "workers", "loader", "sampler", "stream", "stream workers"):
        size, steps = (7, 4) if name == "sampler" else (6, 3)
        joined = list(zip(*(rank[name] for rank in ranks), strict=True))
        assert [step[0][0] for step in joined] == [
            (epoch, size * at, size, at == steps - 1) for epoch in range(3) for at in range(steps)
        ]
        assert joined[-1][0][1] == Position(7, 3, 0)
        used = [[int(row) for _, _, rows in step for row in rows] for step in joined]
        assert all(len(rows) == size for rows in used)
        if name != "sampler":
            epochs = [
                list(itertools.chain(*used[at : at + steps])) for at in range(0, 3 * steps, steps)
            ]
            assert all(len(set(epoch)) == size * steps for epoch in epochs)
        # The rest of a run that is resumed after two steps of the second epoch.
        if name != "sampler":
            for rank in ranks:
                assert rank[f"{name} resumed"] == rank[name][steps + 2 :]


class Opened(Dataset):  # type: ignore[type-arg]
    """Must be opened in each worker."""

    file: str | None = None

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return f"{index} of {self.file}"


def _open(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.file = f"file {worker}"


def _initialized(job: Job) -> list[str]:
    loader = DataLoader(Opened(), batch_size=1, num_workers=2, worker_init_fn=_open)
    with_loader = Batches(job, loader)
    found = [m.batch[0] for step in with_loader.iterate(Position(7), epochs=1) for m in step]
    with_loader.close()
    return found + [each.batch[0] for each in EvaluationBatches(job, loader)]


def _evaluated_equally(job: Job) -> list[tuple[str, int]]:
    loader = DataLoader(Opened(), batch_size=4, num_workers=1, worker_init_fn=_open)
    return [(each.batch[-1], each.count) for each in EvaluationBatches(job, loader, equal=True)]


def test_worker_init_fn_finds_the_dataset() -> None:
    expected = [f"{index} of file {index % 2}" for index in range(6)]
    assert run_ranks(_initialized, nproc=1) == [expected * 2]
    one, two = ("3 of file 0", 4), ("5 of file 0", 2)
    assert run_ranks(_evaluated_equally, nproc=3) == [[("3 of file 0", 0)], [one], [two]]


def _evaluated(job: Job) -> Any:
    found = {}
    for name in ("shuffle", "distributed", "subset", "lengths"):
        for workers in (0, 2):
            batches = EvaluationBatches(job, _loader(name, workers))
            rows = [(each.index, each.batch[0].tolist()) for each in batches]
            found[name, workers] = batches.num_samples, rows
    return found


def test_an_evaluation_reads_what_the_sampler_selects() -> None:
    everyone = run_ranks(_evaluated, nproc=3)
    first = run_ranks(_evaluated, nproc=1)[0]
    for (name, workers), (size, alone) in first.items():
        rows = [row for rank in everyone for row in rank[name, workers][1]]
        assert rows == alone == first[name, 0][1]
        ids = [i for _, batch in rows for i in batch]
        chosen = [1, 2, 3, 4, 6, 9, 15] if name == "subset" else list(range(SIZE))
        assert sorted(ids) == chosen
        assert size == len(chosen)
        assert max(len(batch) for _, batch in rows) == (4 if name == "lengths" else 3)
        if name in ("shuffle", "distributed"):
            assert ids == chosen


# Refusals


def _different_order(job: Job) -> None:
    class Mine(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(job.rank, SIZE - SIZE % job.world_size, job.world_size))

    Batches(job, DataLoader(DATA, batch_size=2, sampler=Mine()))


def test_a_sampler_that_differs_between_ranks_is_refused() -> None:
    with pytest.raises(RankDisagreement, match="Mine") as caught:
        run_ranks(_different_order, nproc=3)
    assert f"{SIZE // 3}" in str(caught.value)
    assert "indices of all ranks" in str(caught.value)


def _sampler_on_one_rank(job: Job, evaluates: bool) -> None:
    own: Any = SetEpoch() if job.rank == 1 else SequentialSampler(DATA)
    loader = DataLoader(DATA, batch_size=2, sampler=own)
    if evaluates:
        EvaluationBatches(job, loader)
    else:
        Batches(job, loader, global_batch=4)


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_sampler_that_only_some_ranks_have_is_refused_on_all(evaluates: bool) -> None:
    for outcome in run_failing_ranks(_sampler_on_one_rank, evaluates, nproc=3):
        assert isinstance(outcome.error, RankDisagreement), outcome.text
        assert "SetEpoch" in str(outcome.error)


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(SIZE))


def _outside(job: Job, dataset: Any, workers: int) -> None:
    loader = DataLoader(dataset, sampler=[0, 3, 99], batch_size=2, num_workers=workers)
    _read(Batches(job, loader))


class Prepared(DataLoader):  # type: ignore[type-arg]
    __module__ = "accelerate.data_loader"


class Some(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        return iter([0, 1, None, 3])


def _none(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


class Missing(Augmented):
    def __getitem__(self, index: int) -> Any:
        return None if index == 5 else index


class Growing(Sampler[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(5 + self.epoch))


class Circular(Growing):
    def __init__(self) -> None:
        self.itself = self


def _read(batches: Batches) -> None:
    for step in batches.iterate(Position(7), epochs=2):
        list(step)


REFUSED: list[tuple[str, type[Exception], Callable[[Job], Any]]] = [
    (
        "def shard(self, index, count)",
        ConfigError,
        lambda job: Batches(job, DataLoader(Numbers(5), batch_size=2)),
    ),
    ("batch_size=None", ConfigError, lambda job: Batches(job, DataLoader(DATA, batch_size=None))),
    (
        "no step is left: the dataset has 23 samples, fewer than global_batch=24",
        ConfigError,
        lambda job: Batches(job, DataLoader(DATA, 8, drop_last=True), global_batch=24),
    ),
    (
        "drop_last was given together with a loader",
        ConfigError,
        lambda job: Batches(job, DataLoader(DATA, 8), drop_last=True),
    ),
    (
        "global_batch must be an integer of at least 1, got 0",
        ConfigError,
        lambda job: Batches(job, DataLoader(DATA, batch_size=8), global_batch=0),
    ),
    (
        "shuffle was given together with a loader",
        ConfigError,
        lambda job: Batches(job, DataLoader(DATA, batch_size=2), shuffle=True),
    ),
    (
        "workers was given together",
        ConfigError,
        lambda job: Batches(job, DataLoader(DATA, batch_size=2), workers=0),
    ),
    ("global_batch must be an integer", ConfigError, lambda job: Batches(job, DATA)),
    (
        "is an iterator",
        ConfigError,
        lambda job: Batches(job, iter(DataLoader(DATA, batch_size=2)), global_batch=2),
    ),
    (
        "gives no index",
        ConfigError,
        lambda job: Batches(job, DataLoader(DATA, sampler=SubsetRandomSampler([]))),
    ),
    *(
        (
            "something else than integers",
            ConfigError,
            lambda job, given=given: Batches(job, DataLoader(DATA, sampler=given)),
        )
        for given in (["a", "b"], [1.0, 2.5], [(0, 100), (1, 100)], [2**70])
    ),
    (
        "something else than lists of integers",
        ConfigError,
        lambda job: Batches(job, DataLoader(DATA, batch_sampler=[1, 2])),
    ),
    (
        "Endless gives more than 1048576 indices and does not end",
        ConfigError,
        lambda job: Batches(job, DataLoader(DATA, sampler=Endless())),
    ),
    *(
        (
            "gives the index 99, but the dataset has",
            ConfigError,
            lambda job, data=data, workers=workers: _outside(job, data, workers),
        )
        for data in (
            TensorDataset(torch.arange(5)),
            Subset(TensorDataset(torch.arange(9)), [4, 5, 6, 7]),
            Subset(DATA, [4, 5, 6, 7]),
        )
        for workers in (0, 1)
    ),
    (
        "gives the index -1",
        ConfigError,
        lambda job: Batches(job, DataLoader(DATA, batch_sampler=[[0, 1], [-1]])),
    ),
    (
        "prepared by Accelerate",
        ConfigError,
        lambda job: Batches(job, Prepared(DATA)),
    ),
    (
        "Stateful keeps a random state of its own",
        ConfigError,
        lambda job: Batches(job, DataLoader(DATA, sampler=Stateful())),
    ),
    (
        "Circular gives 6 indices in epoch 1 and 5 in epoch 0",
        DataError,
        lambda job: _read(Batches(job, DataLoader(DATA, sampler=Circular()))),
    ),
    (
        "sample 5 is None",
        DataError,
        lambda job: _read(Batches(job, DataLoader(Missing(), batch_size=4, collate_fn=_none))),
    ),
    (
        "sample 2 is None",
        DataError,
        lambda job: _read(Batches(job, Some(), global_batch=4, collate=_none)),
    ),
    (
        "batch_size=None",
        ConfigError,
        lambda job: EvaluationBatches(job, DataLoader(DATA, batch_size=None)),
    ),
    (
        "collate was given together",
        ConfigError,
        lambda job: EvaluationBatches(job, DataLoader(DATA), collate=default_collate),
    ),
]


def _refused(job: Job) -> None:
    for match, kind, build in REFUSED:
        with pytest.raises(kind, match=match.replace("(", r"\(").replace(")", r"\)")):
            build(job)


def test_what_cannot_be_adopted_is_refused() -> None:
    run_ranks(_refused, nproc=1)


def _other_packages(job: Job) -> Any:
    import datasets
    from torchdata.stateful_dataloader import StatefulDataLoader

    rows = datasets.Dataset.from_dict({"x": list(range(SIZE))}).with_format("torch")
    loaders: list[Any] = [
        DataLoader(rows, batch_size=4, shuffle=True),  # type: ignore[arg-type]
        StatefulDataLoader([{"x": i} for i in range(SIZE)], batch_size=4, shuffle=True),
    ]
    seen = []
    for loader in loaders:
        batches = Batches(job, loader, global_batch=8)
        steps = batches.iterate(Position(7), epochs=1)
        seen.append([i for step in steps for micro in step for i in micro.batch["x"].tolist()])
    return seen


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.ci
def test_loaders_and_datasets_of_other_packages(nproc: int) -> None:
    for package in ("datasets", "torchdata"):
        pytest.importorskip(package)
    ranks = run_ranks(_other_packages, nproc=nproc)
    for kind, by_rank in zip(("datasets", "torchdata"), zip(*ranks, strict=True), strict=True):
        ids = [i for own in by_rank for i in own]
        assert sorted(ids) == list(range(SIZE)), kind
        assert ids != sorted(ids)
