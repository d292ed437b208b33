"""Records what torch's DataLoader gives to each rank: samples, order, random states."""

from __future__ import annotations

import copy
import dis
import random
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
    get_worker_info,
)

from paceline import torch_private
from paceline.audit import union
from paceline.audit.digests import (
    digest,
    exact_parts,
    magnitude,
    number_of_samples,
    random_states,
)
from paceline.audit.events import (
    BatchGiven,
    EventOfPass,
    LoaderSeen,
    PassBegun,
    PassCut,
    PassExhausted,
    PassStopped,
    SamplesLoaded,
    TrainingContinues,
)
from paceline.audit.progress import Progress
from paceline.audit.record import (
    calling_frame,
    intercept,
    intercept_private,
    is_user_code,
    user_line,
)
from paceline.watch.stacks import is_script

# So many samples show whether two orders differ.
_ORDER = 1000
_PACELINE = str(Path(__file__).parents[1])
_NEXT_INDEX = "torch.utils.data.dataloader._BaseDataLoaderIter._next_index"
_RESET = "torch.utils.data.dataloader._BaseDataLoaderIter._reset"
_FETCHERS = (
    "torch.utils.data._utils.fetch._MapDatasetFetcher",
    "torch.utils.data._utils.fetch._IterableDatasetFetcher",
)


def install(progress: Progress) -> None:
    """Record the batches of loaders, and the samples that their workers load."""
    hooks = DataHooks(progress)
    intercept("__init__", hooks.build, DataLoader)
    intercept("__iter__", hooks.begin_pass, DataLoader)
    intercept("__len__", hooks.count_batches, DataLoader)
    intercept_private(_NEXT_INDEX, hooks.next_index)
    intercept_private(_RESET, hooks.reset)
    for path in _FETCHERS:
        fetcher = torch_private.find(path)
        if fetcher is not None:
            intercept("fetch", hooks.fetch, fetcher)


class DataHooks:
    """What the loaders of a rank give to the script."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._recorder = progress.recorder
        self._count: Callable[[Any], int] = DataLoader.__len__
        # With the loader, because the id of a deleted one could be that of another object.
        self._seen: dict[int, tuple[LoaderSeen, DataLoader[Any]]] = {}
        # The loader of each dataset, by its id. Of several loaders of one dataset, the one whose first use
        # came last: if they take turns, all fetches get its name.
        self._of_dataset: dict[int, str] = {}
        self._places: Counter[str] = Counter()
        self._passes: Counter[str] = Counter()
        self._union = union.UnionLoaders(progress.plan)
        # Where each loader was built.
        self._built: WeakKeyDictionary[DataLoader[Any], str] = WeakKeyDictionary()
        self._watched: set[type] = set()  # the types whose `set_epoch` is recorded
        self._epochs: dict[int, int] = {}  # the latest epoch of each dataset or sampler, by id
        # The number of batches of a rank in each of these loaders, by where it was built.
        self._lengths = {
            seen.built: self._union.length(name) for name, seen in self._union.loaders.items()
        }

    def build(
        self, init: Callable[..., None], loader: DataLoader[Any], *args: Any, **kw: Any
    ) -> None:
        self._built[loader] = self._numbered(f"built {user_line()}")
        init(loader, *args, **kw)
        for kind in {type(loader.dataset), type(_sampler(loader))} - self._watched:
            if hasattr(kind, "set_epoch"):
                self._watched.add(kind)
                intercept("set_epoch", self.set_epoch, kind)

    def set_epoch(self, set_epoch: Callable[..., Any], of: Any, *args: Any, **kwargs: Any) -> Any:
        epoch: Any = next(iter((*args, *kwargs.values())), None)
        if hasattr(epoch, "__index__"):  # else it is no number, and cannot be compared with others
            self._epochs[id(of)] = int(epoch)
        return set_epoch(of, *args, **kwargs)

    def begin_pass(self, begin: Callable[[Any], Iterator[Any]], loader: DataLoader[Any]) -> Any:
        if calling_frame().f_code.co_filename.startswith(_PACELINE):
            return begin(loader)
        seen = self._describe(loader)
        name, pass_number = seen.loader, self._passes[seen.loader]
        self._passes[name] += 1
        self._recorder.write(
            PassBegun(
                loader=name,
                at=user_line(),
                pass_number=pass_number,
                steps_done=self._progress.steps,
                epoch=self._epoch_of(loader),
            )
        )
        if self._is_over(name):
            self._progress.on_empty_pass()
            batches: Iterator[Any] = iter(())
        elif name in self._union.loaders:
            if not self._union.has_pass(name, pass_number):
                self._progress.on_empty_pass()
            collate = None if loader.batch_sampler is None else loader.collate_fn
            batches = self._union.batches(name, pass_number, collate)
        else:
            batches = begin(loader)
        return _RecordedPass(self, loader, seen, pass_number, batches)

    def _epoch_of(self, loader: DataLoader[Any]) -> int | None:
        """The epoch that the script has set; None if it has set none."""
        sampler = _sampler(loader)
        found = (self._epochs.get(id(each)) for each in (sampler, loader.dataset))
        epoch = getattr(sampler, "epoch", None)
        return epoch if epoch is not None else next((e for e in found if e is not None), None)

    def count_batches(self, count: Callable[[Any], int], loader: DataLoader[Any]) -> int:
        if is_user_code(calling_frame()):
            # Not as a use that gives the loader its name: only one rank may print the length.
            of_ranks = self._lengths.get(self._built.get(loader, ""))
        else:
            name = self._describe(loader).loader
            of_ranks = self._union.length(name) if name in self._union.loaders else None
        return count(loader) if of_ranks is None else of_ranks

    def record_batch(self, pass_: _RecordedPass, index: Any, batch: Any) -> None:
        """Record a batch before the script gets it."""
        name, batches = pass_.seen.loader, pass_.seen.batches
        self._progress.on_batch(name, batches and batches - pass_.num_batches - 1)
        self._recorder.write(
            BatchGiven(
                loader=name,
                pass_number=pass_.number,
                ids=_samples_of(pass_.loader.dataset, index),
                size=number_of_samples(batch),
                content=digest(batch),
                steps_done=self._progress.steps,
            )
        )

    def choose_end(self, pass_: _RecordedPass, frame: FrameType) -> type[EventOfPass] | None:
        """The event that ends a pass before its next batch; None if it goes on.

        After the wanted steps all training passes end. Before, one is cut if the order of the next pass
        depends on `set_epoch`, and the run would not see it begin.

        Args:
            frame: Where the script asks for the batch. Only a loop handles StopIteration.
        """
        seen, batches = pass_.seen, pass_.seen.batches or 0
        if self._is_over(seen.loader):
            if not _is_in_loop(frame):
                self._progress.end()
            if pass_.num_batches < batches:
                self._recorder.write(TrainingContinues())
            return PassStopped
        may_cut = (
            pass_.num_batches > 0
            and ("epoch" in seen.sharding or seen.takes_epoch)
            and seen.sharding.get("shuffle", True)
            and seen.loader in self._progress.training_loaders
            and _is_in_loop(frame)
        )
        return PassCut if may_cut and self._progress.cuts_pass(batches) else None

    def record_end(self, pass_: _RecordedPass, how: type[EventOfPass]) -> None:
        """Record how a pass ended."""
        steps = self._progress.steps
        self._recorder.write(
            how(loader=pass_.seen.loader, pass_number=pass_.number, steps_done=steps)
        )

    def _is_over(self, name: str) -> bool:
        """Whether this is a training loader, and the wanted steps are done."""
        return self._progress.is_over and name in self._progress.training_loaders

    def next_index(self, next_index: Callable[[Any], Any], iterator: Any) -> Any:
        """Keep the indices of the batches that the iterator has not given yet."""
        index = next_index(iterator)
        iterator.__dict__.setdefault("_paceline_indices", deque()).append(index)
        return index

    def reset(self, reset: Callable[..., None], iterator: Any, *args: Any, **kwargs: Any) -> None:
        """With persistent workers an iterator serves all passes; it has prefetched for one that was left."""
        iterator.__dict__.pop("_paceline_indices", None)
        reset(iterator, *args, **kwargs)

    def fetch(self, fetch: Callable[[Any, Any], Any], fetcher: Any, index: Any) -> Any:
        name = self._of_dataset.get(id(fetcher.dataset))
        if name is None:
            return fetch(fetcher, index)
        samples: Any = None
        collate = fetcher.collate_fn
        plan = self._progress.plan

        def collate_and_keep(data: Any) -> Any:
            nonlocal samples
            samples = data
            if plan.mode != "ordinary":
                return collate(data)
            saved = union.serialize(data if fetcher.auto_collation else [data])
            batch = collate(data)
            union.save_samples(plan, saved, batch)
            return batch

        fetcher.collate_fn = collate_and_keep
        before = random_states(fetcher.dataset)
        try:
            return fetch(fetcher, index)
        finally:
            fetcher.collate_fn = collate
            after = random_states(fetcher.dataset)
            if not (fetcher.auto_collation and isinstance(samples, list)):
                samples = [] if samples is None else [samples]
            worker = get_worker_info()
            self._recorder.write(
                SamplesLoaded(
                    loader=name,
                    worker=worker.id if worker else None,
                    pass_number=max(self._passes[name] - 1, 0),
                    ids=_samples_of(fetcher.dataset, index),
                    contents=[digest(sample) for sample in samples],
                    labels=[exact_parts(sample) for sample in samples],
                    magnitudes=[magnitude(sample) for sample in samples],
                    random=before,
                    drew={k: v for k, v in after.items() if v != before.get(k)},
                )
            )

    def _describe(self, loader: DataLoader[Any]) -> LoaderSeen:
        """The description of a loader, which is recorded at its first use."""
        if id(loader) in self._seen:
            return self._seen[id(loader)][0]
        at = user_line()
        name = self._numbered(at)  # equal in all runs
        self._of_dataset[id(loader.dataset)] = name
        sampler, dataset = _sampler(loader), loader.dataset
        settings = ("num_replicas", "seed", "shuffle", "epoch", "replacement")
        iterable = isinstance(dataset, IterableDataset)
        sized: Any = dataset if hasattr(dataset, "__len__") and not iterable else None
        root: Any = None if sized is None else _root(sized)[0]
        try:
            batches = self._count(loader)
        except (TypeError, ValueError, NotImplementedError):
            batches = None  # an iterable dataset, or a sampler without a length
        seen = LoaderSeen(
            loader=name,
            at=at,
            sampler=type(sampler).__name__,
            sampler_id=id(sampler),  # of one sampler only, because its loader is kept
            sharding={n: getattr(sampler, n) for n in settings if hasattr(sampler, n)},
            takes_epoch=hasattr(dataset, "set_epoch") or hasattr(sampler, "set_epoch"),
            reorders=_reorders(sampler),
            batch_size=loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
            iterable=iterable,
            dataset=type(dataset).__name__,
            of_library=not _is_of_script(type(dataset)),
            split=digest(list(dataset.indices)) if isinstance(dataset, Subset) else None,
            samples=None if sized is None else len(sized),
            root_samples=len(root) if hasattr(root, "__len__") else None,
            batches=batches,
            persistent=loader.persistent_workers,
            built=self._built.get(loader, ""),
        )
        self._recorder.write(seen)
        self._seen[id(loader)] = seen, loader
        return seen

    def _numbered(self, at: str) -> str:
        """A name for a loader at this line, which is used in names of files too."""
        self._places[at] += 1
        return f"{re.sub(r'[^A-Za-z0-9]+', '-', at)}-{self._places[at] - 1}"


class _RecordedPass:
    """The iterator of one pass over a loader, which records its batches.

    Attributes:
        seen: The description of the loader.
        number: The number of the pass over this loader, from 0.
        num_batches: The batches that the script got so far.
    """

    def __init__(
        self,
        hooks: DataHooks,
        loader: DataLoader[Any],
        seen: LoaderSeen,
        number: int,
        batches: Iterator[Any],
    ) -> None:
        self.loader, self.seen, self.number = loader, seen, number
        self.num_batches = 0
        self._hooks, self._batches = hooks, batches
        self._ended = False

    def __del__(self) -> None:
        if not self._ended and not sys.is_finalizing():
            self._hooks.record_end(self, PassStopped)

    def __iter__(self) -> _RecordedPass:
        return self

    def __next__(self) -> Any:
        end = self._hooks.choose_end(self, sys._getframe(1))
        if end is None:
            try:
                batch = next(self._batches)
            except StopIteration:
                end = PassExhausted
        if end is not None:
            self._ended = True
            self._hooks.record_end(self, end)
            raise StopIteration
        indices = getattr(self._batches, "_paceline_indices", None)
        self._hooks.record_batch(self, indices.popleft() if indices else None, batch)
        self.num_batches += 1
        return batch

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_batches"], name)


def _is_in_loop(frame: FrameType) -> bool:
    """Whether the next item is asked for by a loop, which handles StopIteration."""
    instruction = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return instruction.startswith(("FOR_ITER", "YIELD", "SEND"))


def _is_of_script(kind: type) -> bool:
    """Whether a type is defined in the script or in another file of the user."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is None or is_script(file)


def _sampler(loader: DataLoader[Any]) -> Any:
    """The sampler that decides which samples a rank gets."""
    inner = getattr(loader.batch_sampler, "sampler", None)
    # If the script gives a batch sampler, torch also builds a sampler that is never used.
    own = loader.batch_sampler if type(loader.batch_sampler) is not BatchSampler else None
    candidates = [s for s in (inner, own, loader.sampler) if s is not None]
    sharding = [s for s in candidates if hasattr(s, "num_replicas")]
    return (sharding or candidates or [None])[0]


def _reorders(sampler: Any) -> bool | None:
    """Whether a copy of a sampler of torch has another order in the next epoch; None if it is no such one.

    A copy shares generators and iterators with the sampler, whose state must not change.
    """
    if not isinstance(sampler, DistributedSampler):
        return None
    if any(isinstance(x, Iterator | torch.Generator) for x in vars(sampler).values()):
        return None
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    orders = []
    try:
        for epoch in (sampler.epoch, sampler.epoch + 1):
            other = copy.copy(sampler)
            other.epoch = epoch
            orders.append(list(islice(iter(other), _ORDER)))
    except Exception:
        return None  # a sampler of the script may need what a copy has not
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])
    return orders[0] != orders[1]


def _samples_of(dataset: Any, index: Any) -> list[Any] | None:
    """The index of each sample in the dataset behind all `Subset`s; None if the dataset has no indices."""
    if index is None or isinstance(dataset, IterableDataset):
        return None
    index = index.tolist() if hasattr(index, "tolist") else index
    _, ids = _root(dataset, list(index) if isinstance(index, list | tuple) else [index])
    return [int(i) if hasattr(i, "__index__") else str(i) for i in ids]


def _root(dataset: Any, ids: list[Any] | None = None) -> tuple[Any, list[Any]]:
    """The dataset behind all `Subset`s, and the indices in it."""
    ids = ids or []
    while isinstance(dataset, Subset):
        ids = [dataset.indices[i] for i in ids]
        dataset = dataset.dataset
    return dataset, ids
