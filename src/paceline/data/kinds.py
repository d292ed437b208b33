"""What kinds of dataset there are, and the checks on what a user passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch.utils.data import IterableDataset

from paceline.errors import ConfigError


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be read from its start.

    Raises:
        ConfigError: it can be read in no way that is known here.
    """
    if isinstance(dataset, IterableDataset):
        return True  # it inherits a `__getitem__` that only raises
    if callable(getattr(dataset, "__getitem__", None)):
        return False
    if isinstance(dataset, Iterable):
        if isinstance(dataset, Iterator):
            raise ConfigError(
                f"{type(dataset).__name__} is an iterator, which can be read only once.",
                fix="pass an object whose `__iter__` starts anew each epoch.",
            )
        return True
    raise ConfigError(
        f"{type(dataset).__name__} is no dataset.",
        why="it has neither `__getitem__` nor `__iter__`.",
        fix="pass a torch Dataset or IterableDataset, or a sequence of samples.",
    )


def checked_size(dataset: Any) -> int:
    """How many samples a map-style dataset has.

    Raises:
        ConfigError: it is empty, a stream, or has no length.
    """
    if is_stream(dataset):
        raise ConfigError(f"{type(dataset).__name__} is a stream, which has no length.")
    if not isinstance(dataset, Sized):
        raise ConfigError(
            f"{type(dataset).__name__} has `__getitem__` and no `__len__`.",
            fix="add `__len__`, or drop `__getitem__` and write `__iter__` for a stream.",
        )
    size = len(dataset)
    if size < 1:
        raise ConfigError("the dataset is empty.", why=f"len({type(dataset).__name__}) is {size}.")
    return size


def refuse_sizes(**sizes: tuple[Any, int]) -> None:
    """Refuse what is no whole number, or less than its least: `name=(value, least)`.

    Raises:
        ConfigError: names the first such.
    """
    for name, (value, least) in sizes.items():
        if type(value) is not int or value < least:
            raise ConfigError(
                f"{name} must be a whole number of at least {least}, got {value!r}.", option=name
            )
