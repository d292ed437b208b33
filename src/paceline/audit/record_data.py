"""Records what torch's DataLoader gives to each rank: samples, order, random states."""

from __future__ import annotations

import dis
import functools
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset, get_worker_info

from paceline import torch_private
from paceline.audit import replay
from paceline.audit.progress import Progress
from paceline.audit.record import digest, exact_parts, leaves, random_states, user_line

_PACELINE = str(Path(__file__).parents[1])
_NEXT_INDEX = "torch.utils.data.dataloader._BaseDataLoaderIter._next_index"
_FETCHERS = (
    "torch.utils.data._utils.fetch._MapDatasetFetcher",
    "torch.utils.data._utils.fetch._IterableDatasetFetcher",
)


def install(progress: Progress) -> None:
    """Record the batches of loaders, and the samples that their workers load."""
    hooks = _Hooks(progress)
    DataLoader.__iter__ = hooks.wrap_iter(DataLoader.__iter__)  # type: ignore[method-assign]
    DataLoader.__len__ = hooks.wrap_len(DataLoader.__len__)  # type: ignore[method-assign]
    torch_private.wrap(_NEXT_INDEX, _recording_index)
    for path in _FETCHERS:
        fetcher = torch_private.find(path)
        if fetcher is not None:
            fetcher.fetch = hooks.wrap_fetch(fetcher.fetch)


def _recording_index(next_index: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(next_index)
    def watched(iterator: Any) -> Any:
        index = next_index(iterator)
        iterator.__dict__.setdefault("_paceline_indices", deque()).append(index)
        return index

    return watched


class _Hooks:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._recorder = progress.recorder
        self._names: dict[int, str] = {}
        self._of_dataset: dict[int, str] = {}
        self._kept: list[Any] = []
        self._places: Counter[str] = Counter()
        self._passes: Counter[str] = Counter()
        self._replayed = replay.training_loaders(progress.plan)

    def wrap_iter(self, begin: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(begin)
        def watched(loader: DataLoader[Any]) -> Any:
            if sys._getframe(1).f_code.co_filename.startswith(_PACELINE):
                return begin(loader)
            name = self._name(loader)
            pass_number = self._passes[name]
            self._passes[name] += 1
            sampler = _sampler(loader)
            self._recorder.write(
                "iter",
                loader=name,
                at=user_line(),
                pass_number=pass_number,
                s=self._progress.steps,
                epoch=getattr(sampler, "epoch", None),
            )
            if self.is_over(name):
                self._progress.begins_again()
                return _RecordedIterator(self, name, pass_number, iter(()))
            if name in self._replayed:
                replayed = replay.batches(self._progress, name, pass_number)
                return _RecordedIterator(self, name, pass_number, replayed)
            return _RecordedIterator(self, name, pass_number, begin(loader), loader)

        return watched

    def wrap_len(self, count: Callable[[Any], int]) -> Callable[[Any], int]:
        self._count = count

        @functools.wraps(count)
        def watched(loader: DataLoader[Any]) -> int:
            replayed = self._replayed.get(self._name(loader))
            return count(loader) if replayed is None else replayed

        return watched

    def record_batch(
        self, name: str, pass_number: int, number: int, index: Any, dataset: Any, batch: Any
    ) -> None:
        """Record a batch before the script gets it."""
        self._progress.gave_batch(name)
        self._recorder.write(
            "batch",
            loader=name,
            pass_number=pass_number,
            ids=_root_ids(dataset, index),
            size=_size(batch),
            content=digest(batch),
            s=self._progress.steps,
        )
        if self._progress.plan.mode == "solo" and not self._progress.is_over:
            replay.keep_batch(self._progress, name, pass_number, number, batch)

    def record_pass(self, kind: str, name: str, pass_number: int) -> None:
        """Record the end of a pass ("pass-end"), or that the script left it before ("pass-left")."""
        self._recorder.write(kind, loader=name, pass_number=pass_number)

    def end_if_called_by_next(self, frame: FrameType) -> None:
        """End a script that calls `next()`, because only a loop handles StopIteration."""
        instruction = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        if not instruction.startswith(("FOR_ITER", "YIELD", "SEND")):
            self._progress.end()

    def is_over(self, name: str) -> bool:
        """Whether this is a training loader, and the wanted steps are done."""
        return self._progress.is_over and name in self._progress.training_loaders

    def wrap_fetch(self, fetch: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        @functools.wraps(fetch)
        def watched(fetcher: Any, index: Any) -> Any:
            name = self._of_dataset.get(id(fetcher.dataset))
            if name is None:
                return fetch(fetcher, index)
            seen: list[Any] = []
            collate = fetcher.collate_fn
            fetcher.collate_fn = _keeping_samples(collate, seen)
            before = random_states(fetcher.dataset)
            try:
                return fetch(fetcher, index)
            finally:
                fetcher.collate_fn = collate
                after = random_states(fetcher.dataset)
                self._record_fetch(name, fetcher, index, seen, before, after)

        return watched

    def _record_fetch(
        self,
        name: str,
        fetcher: Any,
        index: Any,
        seen: list[Any],
        before: dict[str, str],
        after: dict[str, str],
    ) -> None:
        samples = seen[0] if seen else []
        samples = samples if fetcher.auto_collation and isinstance(samples, list) else [samples]
        worker = get_worker_info()
        self._recorder.write(
            "fetch",
            loader=name,
            worker=worker.id if worker else None,
            pass_number=max(self._passes[name] - 1, 0),
            ids=_root_ids(fetcher.dataset, index),
            contents=[digest(sample) for sample in samples],
            labels=[exact_parts(sample) for sample in samples],
            random=before,
            drew={k: v for k, v in after.items() if v != before.get(k)},
        )

    def _name(self, loader: DataLoader[Any]) -> str:
        """The loader's name, equal in all runs: the line of its first use, and a number."""
        if id(loader) not in self._names:
            self._kept.append(
                loader
            )  # a loader that is deleted would free its id for another object
            at = user_line()
            name = f"{re.sub(r'[^A-Za-z0-9]+', '-', at)}-{self._places[at]}"
            self._places[at] += 1
            self._names[id(loader)] = name
            self._of_dataset[id(loader.dataset)] = name
            self._recorder.write("loader", loader=name, at=at, **self._describe(loader))
        return self._names[id(loader)]

    def _describe(self, loader: DataLoader[Any]) -> dict[str, Any]:
        sampler = _sampler(loader)
        settings = ("num_replicas", "rank", "seed", "shuffle", "drop_last", "epoch")
        sized = not isinstance(loader.dataset, IterableDataset) and hasattr(
            loader.dataset, "__len__"
        )
        return {
            "sampler": type(sampler).__name__,
            "sharding": {n: getattr(sampler, n) for n in settings if hasattr(sampler, n)},
            "takes_epoch": hasattr(loader.dataset, "set_epoch") or hasattr(sampler, "set_epoch"),
            "batch_size": loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
            "iterable": isinstance(loader.dataset, IterableDataset),
            "dataset": type(loader.dataset).__name__,
            "samples": len(loader.dataset) if sized else None,  # type: ignore[arg-type]
            "root_samples": len(_root(loader.dataset)) if sized else None,
            "batches": self._length(loader),
        }

    def _length(self, loader: DataLoader[Any]) -> int | None:
        try:
            return self._count(loader)
        except TypeError:
            return None  # an iterable dataset


def _keeping_samples(collate: Callable[[Any], Any], seen: list[Any]) -> Callable[[Any], Any]:
    def collate_and_keep(data: Any) -> Any:
        seen.append(data)
        return collate(data)

    return collate_and_keep


class _RecordedIterator:
    """An iterator that records its batches. `loader` is None if the batches do not come from a loader."""

    def __init__(
        self,
        hooks: _Hooks,
        name: str,
        pass_number: int,
        inner: Iterator[Any],
        loader: DataLoader[Any] | None = None,
    ) -> None:
        self._hooks, self._name, self._pass_number = hooks, name, pass_number
        self._inner, self._loader = inner, loader
        self._number = 0
        self._ended = False

    def __del__(self) -> None:
        if not self._ended and not sys.is_finalizing():
            self._hooks.record_pass("pass-left", self._name, self._pass_number)

    def __iter__(self) -> _RecordedIterator:
        return self

    def __next__(self) -> Any:
        try:
            if self._hooks.is_over(self._name):
                self._hooks.end_if_called_by_next(sys._getframe(1))
                raise StopIteration
            batch = next(self._inner)
        except StopIteration:
            self._ended = True
            self._hooks.record_pass("pass-end", self._name, self._pass_number)
            raise
        indices = getattr(self._inner, "_paceline_indices", None)
        index = indices.popleft() if indices else None
        dataset = None if self._loader is None else self._loader.dataset
        self._hooks.record_batch(self._name, self._pass_number, self._number, index, dataset, batch)
        self._number += 1
        return batch

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)


def _sampler(loader: DataLoader[Any]) -> Any:
    """The sampler that decides which samples a rank gets."""
    inner = getattr(loader.batch_sampler, "sampler", None)
    # Beside the script's own batch sampler, torch builds a sampler that is never used.
    own = loader.batch_sampler if type(loader.batch_sampler) is not BatchSampler else None
    candidates = [s for s in (inner, own, loader.sampler) if s is not None]
    sharding = [s for s in candidates if hasattr(s, "num_replicas")]
    return (sharding or candidates or [None])[0]


def _root_ids(dataset: Any, index: Any) -> list[Any] | None:
    """The samples' indices in the dataset behind all subsets; None if it has no indices."""
    if index is None or dataset is None or isinstance(dataset, IterableDataset):
        return None
    ids = list(index) if isinstance(index, list | tuple) else [index]
    while isinstance(dataset, Subset):
        ids = [dataset.indices[i] for i in ids]
        dataset = dataset.dataset
    return [int(i) if hasattr(i, "__index__") else str(i) for i in ids]


def _root(dataset: Any) -> Any:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def _size(batch: Any) -> int | None:
    for leaf in leaves(batch):
        if hasattr(leaf, "shape") and len(leaf.shape):
            return int(leaf.shape[0])
    return None
