"""`Batches` on one process: samples, randomness, loading, errors."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
)

import paceline
from paceline.data.batches import Batches
from paceline.data.evaluation import EvaluationBatches
from paceline.data.plan import Permutation, Position
from paceline.data.samples import Samples, rows_left
from paceline.data.workers import _kill_all
from paceline.errors import ConfigError, DataError, StepError
from paceline.job import rng
from paceline.job.job import Job

START = Position(7)


class Augmented:
    """Draws from all three global generators."""

    def __init__(self, size: int = 13) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if index >= self.size:
            raise IndexError(index)
        drawn = [torch.rand(()).item(), np.random.rand(), np.random.randn(), random.random()]
        return index, torch.tensor(drawn, dtype=torch.float64)


def _everything(batches: Batches, position: Position = START, *, epochs: int = 2) -> list:
    """All that a loop can see, as plain values."""
    seen = []
    for step in batches.iterate(position, epochs=epochs):
        micros = [(_plain(m.batch), m.count, m.offset, m.is_last, m.is_padding) for m in step]
        assert len(micros) == step.num_micro_batches
        where = (step.epoch, step.offset, step.num_samples, step.ends_epoch, step.next_position)
        seen.append((where, micros))
    return seen


def _plain(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, list | tuple):
        return [_plain(part) for part in batch]
    return batch


def _samples(seen: list) -> list:
    """The samples of each step, micro-batches undone: rows of (id, what was drawn)."""
    return [[row for batch, *_ in micros for row in zip(*batch, strict=True)] for _, micros in seen]


@pytest.mark.parametrize(
    "dataset", [Augmented(), TensorDataset(torch.arange(13), torch.arange(13) * 2)]
)
def test_samples_and_their_randomness_are_the_same_for_any_workers_and_micro_batches(
    job: Job, dataset: Any
) -> None:
    first = _everything(Batches(job, dataset, global_batch=5))
    reference = _samples(first)
    assert [len(step) for step in reference] == [5, 5, 3] * 2
    ids = [row[0] for step in reference[:3] for row in step]
    assert ids == Permutation(13, rng.key(7, rng.SHUFFLE, 0))(np.arange(13)).tolist()
    assert [row for step in reference[:3] for row in step] != [
        row for step in reference[3:] for row in step
    ]
    for workers in (0, 1, 2):
        for micro_batch in (1, 2, 5):
            batches = Batches(
                job, dataset, global_batch=5, micro_batch=micro_batch, workers=workers
            )
            assert _samples(_everything(batches)) == reference
            batches.close()


@pytest.mark.parametrize("micro_batch", [1, 3, 5])
def test_sample_ids_computed_in_blocks_are_those_of_the_order(
    job: Job, micro_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.data.loader._BLOCK", 4)  # micro-batches cross the ends of blocks
    data = TensorDataset(torch.arange(13))
    seen = _everything(Batches(job, data, global_batch=5, micro_batch=micro_batch))
    ids = [row[0] for step in _samples(seen) for row in step]
    orders = [Permutation(13, rng.key(7, rng.SHUFFLE, epoch))(np.arange(13)) for epoch in (0, 1)]
    assert ids == np.concatenate(orders).tolist()


def test_a_step_has_its_position_and_size(job: Job) -> None:
    seen = _everything(Batches(job, Augmented(7), global_batch=4, micro_batch=3), epochs=1)
    assert [where for where, _ in seen] == [
        (0, 0, 4, False, Position(7, 0, 4)),
        (0, 4, 3, True, Position(7, 1, 0)),
    ]
    assert [[micro[1:] for micro in micros] for _, micros in seen] == [
        [(3, 0, False, False), (1, 3, True, False)],
        [(3, 4, True, False)],
    ]
    batches = Batches(job, Augmented(7), global_batch=4)
    assert (batches.steps_per_epoch, batches.num_samples, batches.micro_batch) == (2, 7, 4)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_resumed_at_any_position_continues_the_uninterrupted_one(
    job: Job, workers: int
) -> None:
    batches = Batches(job, Augmented(), global_batch=5, micro_batch=2, workers=workers)
    straight = _everything(batches, epochs=3)
    for number, (where, _) in enumerate(straight[:-1]):
        assert _everything(batches, where[-1], epochs=3) == straight[number + 1 :]
    assert _everything(batches, Position(7, 0, 13), epochs=2) == straight[3:6]
    assert _everything(batches, Position(7, 3, 0), epochs=3) == []


def test_loading_leaves_the_generators_of_the_training_alone(job: Job) -> None:
    for workers in (0, 1):
        torch.manual_seed(1)
        np.random.seed(2)
        random.seed(3)
        np.random.randn()  # leaves a second normal number waiting in the state
        before = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()
        batches = Batches(job, Augmented(), global_batch=5, workers=workers)
        _everything(batches)
        batches.close()
        with pytest.raises(DataError):
            _everything(Batches(job, Failing(), global_batch=5))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert repr(np.random.get_state(legacy=False)) == repr(before[1])
        assert random.getstate() == before[2]


class Recording(Augmented):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.calls.append(list(indices))
        return [(index, torch.zeros(1)) for index in indices]


def test_randomness_off_uses_getitems_and_seeds_nothing(job: Job) -> None:
    dataset = Recording()
    _everything(Batches(job, dataset, global_batch=5))
    assert dataset.calls == []
    batches = Batches(job, dataset, global_batch=5, sample_randomness=False)
    ids = [[row[0] for row in step] for step in _samples(_everything(batches, epochs=1))]
    assert dataset.calls == ids
    torch.manual_seed(1)
    plain = Batches(job, Augmented(), global_batch=5, sample_randomness=False)
    assert _samples(_everything(plain)) != _samples(_everything(plain))


class Epochal:
    def __init__(self) -> None:
        self.epoch = -1

    def __len__(self) -> int:
        return 5

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return index, self.epoch


@pytest.mark.parametrize("workers", [0, 2])
def test_set_epoch_is_called_in_time_through_subsets(job: Job, workers: int) -> None:
    data = Subset(Subset(Epochal(), range(5)), range(5))
    for (epoch, *_), micros in _everything(
        Batches(job, data, global_batch=2, workers=workers), epochs=3
    ):
        assert all(set(batch[1]) == {epoch} for batch, *_ in micros)


def test_an_evaluation_leaves_the_epoch_of_a_shared_dataset(job: Job) -> None:
    shared = Epochal()
    validation = EvaluationBatches(job, Subset(shared, [4]))
    for step in Batches(job, Subset(shared, range(4)), global_batch=2).iterate(START, epochs=2):
        assert [micro.batch[1].tolist() for micro in step] == [[step.epoch] * 2]
        assert [one.batch[1].tolist() for one in validation] == [[0]]


def test_a_subset_keeps_what_its_set_offers_and_numbers_samples_itself(job: Job) -> None:
    data = TensorDataset(torch.arange(10) * 10)
    part = Subset(Subset(data, [9, 8, 7, 6, 5]), [4, 0, 2])
    batches = Batches(job, part, global_batch=3, shuffle=False)
    assert _samples(_everything(batches, epochs=1)) == [[(50,), (90,), (70,)]]
    part = Batches(job, Subset(Augmented(), [3, 4]), global_batch=2, shuffle=False)
    whole = Batches(job, Augmented(), global_batch=13, shuffle=False)
    drawn = [row[1] for row in _samples(_everything(part, epochs=1))[0]]
    assert drawn == [row[1] for row in _samples(_everything(whole, epochs=1))[0][:2]]


def test_a_subset_may_have_keys_or_count_from_the_end(job: Job) -> None:
    def read(dataset: Any) -> list:
        batches = Batches(job, dataset, global_batch=9, shuffle=False)
        return next(iter(next(batches.iterate(START, epochs=1)))).batch

    letters: Any = {"a": 1, "b": 2, "c": 3}
    assert read(Subset(letters, ["c", "a"])).tolist() == [3, 1]
    assert read(Subset(Subset(letters, ["c", "a"]), [1, 0])).tolist() == [1, 3]
    assert read(Subset(Subset(range(9), [3, 4, 5]), [-1, 0])).tolist() == [5, 3]
    assert read(Subset(TensorDataset(torch.arange(9)), [-1, 2]))[0].tolist() == [8, 2]


class Doubling(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return tuple(2 * part for part in super().__getitem__(index))


def test_own_getitem_and_own_collate_are_used(job: Job) -> None:
    batches = Batches(job, Doubling(torch.arange(4)), global_batch=4, shuffle=False)
    assert _samples(_everything(batches, epochs=1)) == [[(0,), (2,), (4,), (6,)]]
    data = TensorDataset(torch.arange(5))
    batches = Batches(job, data, global_batch=3, shuffle=False, collate=lambda rows: [len(rows)])
    assert [micros[0][0] for _, micros in _everything(batches, epochs=1)] == [[3], [2]]


def test_micro_batches_are_read_when_asked_for(job: Job) -> None:
    dataset = Recording()
    batches = Batches(job, dataset, global_batch=6, micro_batch=2, sample_randomness=False)
    step = next(iter(batches.iterate(Position(0), epochs=1)))
    assert dataset.calls == []
    next(iter(step))
    assert len(dataset.calls) == 1


def test_workers_are_kept_over_epochs_and_over_runs(job: Job) -> None:
    batches = Batches(job, Pids(), global_batch=2, workers=2)
    pids = set()
    for _ in range(2):
        run = batches.iterate(Position(0), epochs=50)
        for _, step in zip(range(20), run, strict=False):
            pids |= {pid for micro in step for pid in micro.batch.tolist()}
    assert len(pids) == 2
    assert os.getpid() not in pids
    batches.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


class Pids:
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def test_leaving_the_job_ends_workers_and_closed_batches_may_be_started_again() -> None:
    with paceline.join() as job:
        batches = Batches(job, Pids(), global_batch=2, workers=2)
        for _ in range(2):
            next(batches.iterate(Position(0), epochs=9))
            assert len(multiprocessing.active_children()) == 2
            batches.close()
            assert not multiprocessing.active_children()
        next(batches.iterate(Position(0), epochs=9))
    assert not multiprocessing.active_children()
    with pytest.raises(StepError, match="left"):
        batches.iterate(Position(0), epochs=1)


def test_closed_batches_are_not_kept_by_the_job(job: Job) -> None:
    batches = Batches(job, Pids(), global_batch=2, workers=1)
    next(batches.iterate(Position(0), epochs=9))
    batches.close()
    kept = weakref.ref(batches)
    del batches
    gc.collect()
    assert kept() is None


class _Collected:
    """Is freed by the garbage collector only, and notes in which process."""

    def __init__(self, file: Path) -> None:
        self.file, self.itself = file, self

    def __del__(self) -> None:
        with self.file.open("a") as file:
            file.write(f"{os.getpid()}\n")


@pytest.mark.skipif(
    multiprocessing.get_all_start_methods()[0] != "fork", reason="workers are not forked"
)
def test_a_forked_worker_collects_no_object_of_the_rank(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process group would wait there for threads that the worker does not have.
    fork, file = os.fork, tmp_path / "collected"

    def fork_with_garbage() -> int:
        gc.collect()
        _Collected(file)
        return fork()

    monkeypatch.setattr(os, "fork", fork_with_garbage)
    thresholds = gc.get_threshold()
    gc.set_threshold(10, 1, 1)
    try:
        batches = Batches(job, list(range(8)), global_batch=2, workers=2)
        assert [len(list(step)) for step in batches.iterate(START, epochs=1)] == [1] * 4
        batches.close()
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert set(file.read_text().split()) == {str(os.getpid())}


def test_a_forked_child_that_exits_does_not_end_the_workers(job: Job) -> None:
    batches = Batches(job, Pids(), global_batch=2, workers=1)
    next(iter(next(batches.iterate(Position(0), epochs=9))))
    child = os.fork()
    if not child:
        _kill_all()  # runs when the interpreter exits
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    (worker,) = multiprocessing.active_children()
    worker.join(0.2)
    assert worker.exitcode is None
    batches.close()


# Errors


class Failing(Augmented):
    def __getitem__(self, index: int) -> Any:
        if index == 4:
            raise ZeroDivisionError("broken file")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_fails_is_named_with_rank_and_worker(job: Job, workers: int) -> None:
    batches = Batches(job, Failing(), global_batch=5, micro_batch=2, workers=workers)
    with pytest.raises(DataError, match=r"sample 4 .*ZeroDivisionError: broken file") as caught:
        _everything(batches)
    error = caught.value
    assert (error.sample, error.rank) == (4, 0)
    assert error.worker in ((None,) if workers == 0 else (0, 1))
    assert isinstance(error.original, ZeroDivisionError)
    assert isinstance(error.__cause__, ZeroDivisionError)
    if workers:
        assert f"loader worker {error.worker}" in error.where
        assert 'raise ZeroDivisionError("broken file")' in error.__notes__[0]


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class FailingOddly(Augmented):
    def __getitem__(self, index: int) -> Any:
        raise Unpicklable


def test_an_error_that_cannot_be_sent_arrives_as_text(job: Job) -> None:
    batches = Batches(job, FailingOddly(), global_batch=5, workers=1)
    with pytest.raises(DataError, match="Unpicklable: locked") as caught:
        _everything(batches)
    assert caught.value.original is None
    assert "raise Unpicklable" in caught.value.__notes__[0]


class Ragged(Augmented):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(index)


class BrokenLot(Augmented):
    def __getitems__(self, indices: list[int]) -> Any:
        raise OSError("gone")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "text"),
    [(Ragged(), "could not be collated"), (BrokenLot(), "could not be read: OSError: gone")],
)
def test_samples_that_fail_together_are_named(
    job: Job, dataset: Any, text: str, workers: int
) -> None:
    batches = Batches(
        job, dataset, global_batch=3, shuffle=False, workers=workers, sample_randomness=False
    )
    with pytest.raises(DataError, match=f"samples 0, 1, 2 {text}") as caught:
        _everything(batches)
    assert caught.value.samples == [0, 1, 2]


class Dying(Augmented):
    def __init__(self, how: int) -> None:
        super().__init__()
        self.how = how

    def __getitem__(self, index: int) -> Any:
        if index == 6:
            if self.how == 0:
                os._exit(5)
            signal.signal(self.how, signal.SIG_DFL) if self.how != signal.SIGKILL else None
            os.kill(os.getpid(), self.how)
        return index


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (0, "ended with exit code 5"),
        (signal.SIGKILL, "killed by SIGKILL"),
        (signal.SIGRTMIN + 5, f"killed by signal {signal.SIGRTMIN + 5}"),  # without a name
    ],
)
def test_a_worker_that_dies_is_named_with_the_probable_cause(job: Job, how: int, text: str) -> None:
    batches = Batches(job, Dying(how), global_batch=2, shuffle=False, workers=2)
    for _ in range(2):  # the workers are started again
        with pytest.raises(DataError, match=text) as caught:
            _everything(batches)
        # Places 0 to 7 are steps 0 to 3, dealt to workers in turn.
        assert (caught.value.worker, caught.value.rank) == (1, 0)
        assert caught.value.worker_exit_code == (-how or 5)
        assert "memory ran out" in caught.value.why
        batches.close()


def test_a_batch_that_cannot_be_sent_is_an_error_and_no_hang(job: Job) -> None:
    batches = Batches(
        job, Augmented(), global_batch=2, workers=1, collate=lambda rows: [lambda: rows]
    )
    with pytest.raises(DataError, match="cannot be sent"):
        _everything(batches)


class Sizeless(Dataset):  # type: ignore[type-arg]
    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Augmented(), {"global_batch": 0}),
        (Augmented(), {"global_batch": -3}),
        (Augmented(), {"global_batch": 2.0}),
        (Augmented(), {"global_batch": True}),
        (Augmented(), {"global_batch": 4, "micro_batch": 5}),
        (Augmented(), {"global_batch": 4, "micro_batch": 0}),
        (Augmented(), {"global_batch": 4, "workers": -1}),
        (Augmented(0), {"global_batch": 4}),
        (Sizeless(), {"global_batch": 4}),
        (object(), {"global_batch": 4}),
        ((i for i in range(4)), {"global_batch": 4}),
        (Augmented(), {"global_batch": 4, "workers": "auto"}),
        (Stream(), {"global_batch": 4, "shuffle": True}),
    ],
)
def test_bad_input_is_refused(job: Job, dataset: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Batches(job, dataset, **options)


class BatchIterable:
    """Gives batches, as the loaders of other libraries do."""

    batch_size = 8

    def __iter__(self) -> Iterator[Any]:
        return iter([torch.zeros(8, 2)] * 3)


@pytest.mark.parametrize(
    ("loader", "cure"),
    [
        (DataLoader(Stream(), batch_size=2), "loader.dataset"),
        (BatchIterable(), "loader.dataset"),
        (BatchSampler(range(8), 2, drop_last=False), "pass the dataset"),
    ],
)
def test_an_iterable_of_batches_is_refused_with_the_cure(job: Job, loader: Any, cure: str) -> None:
    with pytest.raises(ConfigError, match=cure):
        Batches(job, loader, global_batch=4)
    with pytest.raises(ConfigError, match=cure):
        EvaluationBatches(job, loader, micro_batch=4)


def test_a_position_or_number_of_epochs_out_of_range_is_refused(job: Job) -> None:
    batches = Batches(job, Augmented(), global_batch=4)
    with pytest.raises(ConfigError, match="beyond"):
        batches.iterate(Position(0, 0, 14), epochs=1)
    with pytest.raises(ConfigError, match="epochs"):
        batches.iterate(Position(0), epochs=-1)


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_reads_each_sample_once_in_fixed_pieces(job: Job, workers: int) -> None:
    found = list(EvaluationBatches(job, Augmented(), micro_batch=5, workers=workers))
    assert [(one.index, one.count) for one in found] == [(0, 5), (1, 5), (2, 3)]
    assert [i for one in found for i in one.batch[0].tolist()] == list(range(13))
    with pytest.raises(ConfigError):
        next(EvaluationBatches(job, Stream(), micro_batch=5))


@pytest.mark.parametrize("dataset", [Augmented(), Subset(Augmented(), [3, 1])])
def test_what_workers_hold_can_be_sent_where_they_are_spawned(job: Job, dataset: Any) -> None:
    batches = Batches(job, dataset, global_batch=2, workers=1)
    work = batches._loader._workers._work  # type: ignore[union-attr]
    copy = pickle.loads(pickle.dumps(work))
    ids = torch.tensor([0, 1])
    copies = copy._samples.read(7, 0, ids), work._samples.read(7, 0, ids)
    assert _plain(copies[0]) == _plain(copies[1])


def test_workers_end_at_once_with_the_process_that_started_them(tmp_path: Path) -> None:
    """They would keep a dead rank's connections open, and its peers would wait for it."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, paceline\n"
        "from paceline.data.plan import Position\n"
        "class Busy:\n"
        "    def __len__(self): return 9\n"
        "    def __getitem__(self, index):\n"
        "        if index > 1: signal.pause()\n"
        "        return os.getpid()\n"
        "job = paceline.join()\n"
        "batches = paceline.Batches(job, Busy(), global_batch=1, shuffle=False, workers=2)\n"
        "steps = batches.iterate(Position(0), epochs=1)\n"
        "pids = {pid for _ in range(2) for m in next(steps) for pid in m.batch.tolist()}\n"
        "print(*pids, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # The pipe closes when all that hold it have ended: the script and its busy workers.
    done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, env=environ, timeout=40)
    assert done.returncode == -signal.SIGKILL
    assert len(done.stdout.split()) == 2


@pytest.mark.parametrize(
    ("device", "moves", "pins"),
    [("cpu", True, True), ("cuda:0", True, False), ("cuda:1", False, False)],
)
def test_tensors_of_another_gpu_are_moved(
    job: Job, device: str, moves: bool, pins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "device", torch.device("cuda", 1))
    monkeypatch.setattr(Samples, "ids_device", torch.device(device))
    loader: Any = Batches(job, TensorDataset(torch.arange(4)), global_batch=2)._loader
    assert (loader._moves, loader._pins) == (moves, pins)


class Budget(Sampler[list[int]]):
    """Batches of about as many tokens: the first samples are long. The last batch is smaller."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1], [2, 3], [4, 5, 6, 7, 8, 9, 10, 11], [12])


def test_batches_of_different_size_are_joined_with_a_warning(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    data = TensorDataset(torch.arange(13))
    for loader in (
        DataLoader(data, batch_size=4),  # the last batch is smaller
        DataLoader(data, batch_sampler=BatchSampler(range(13), 4, drop_last=False)),
    ):
        Batches(job, loader)
    Batches(job, DataLoader(data, batch_sampler=Budget()), micro_batch=2)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    Batches(job, DataLoader(data, batch_sampler=Budget()))
    assert "Budget gives batches of 2 to 8 samples" in caplog.text
    assert "Pass micro_batch=2" in caplog.text


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iteration_ends_when_another_one_begins(job: Job, workers: int) -> None:
    batches = Batches(job, TensorDataset(torch.arange(12)), global_batch=4, workers=workers)
    first = batches.iterate(START, epochs=1)
    list(next(first))
    for step in batches.iterate(START, epochs=1):
        list(step)
    with pytest.raises(StepError, match="a later one was started"):
        next(first)
    batches.close()


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (torch.zeros(6, 3), 6),
        ((torch.zeros(6, 3), torch.zeros(6)), 6),
        ({"x": torch.zeros(6, 3), "y": torch.zeros(6)}, 6),
        (torch.zeros(8, 3), None),
        (torch.zeros(5, 8, 3), None),  # time-major
        ([[torch.zeros(3, 20)] * 8, [1] * 8], None),  # a list for each field
        ({"input_ids": torch.zeros(1, 512)}, None),  # packed
        ("text", None),
    ],
)
def test_batches_from_which_samples_were_dropped(batch: Any, rows: int | None) -> None:
    assert rows_left(batch, 8) == rows
