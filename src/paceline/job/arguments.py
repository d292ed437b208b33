"""Errors for calls with wrong arguments, where Python's own would not lead to the cause."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar

from paceline.errors import ConfigError
from paceline.job.job import Job

P = ParamSpec("P")
T = TypeVar("T")

_SIMILARITY = 0.6  # of difflib


def checks_arguments(
    function: Callable[P, T], *, elsewhere: Callable[..., Any] | None = None
) -> Callable[P, T]:
    """Refuse a call without a job where the first parameter is `job`, and keywords that do not exist.

    Args:
        function: A function, or `__init__` of a class.
        elsewhere: Another function, whose arguments are mistaken for those of `function`.
    """
    names = list(inspect.signature(function).parameters)
    is_method = names[0] == "self"
    shown = function.__qualname__.removesuffix(".__init__")
    keywords = names[is_method:]
    takes_job = keywords[0] == "job"

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        if takes_job and "job" not in kwargs:
            _refuse_no_job(shown, keywords, args[is_method:])
        for word in kwargs:
            if word not in keywords:
                _refuse_keyword(shown, word, keywords, elsewhere)
        return function(*args, **kwargs)

    return wrapper


def require_integers(minimum: int, *, or_none: bool = False, **values: Any) -> None:
    """Refuse values that are not integers of at least `minimum`. With `or_none`, None is accepted too.

    Raises:
        ConfigError: for the first such value, under its keyword.
    """
    for name, value in values.items():
        if value is None and or_none:
            continue
        if type(value) is not int or value < minimum:
            raise ConfigError(
                f"{name} must be an integer of at least {minimum}, got {value!r}.", option=name
            )


def _refuse_no_job(name: str, keywords: list[str], args: tuple[Any, ...]) -> None:
    if args and isinstance(args[0], Job):
        return
    got = f"got {type(args[0]).__name__}" if args else "got none"
    raise ConfigError(
        f"the first argument of {name} must be the job, {got}.",
        fix=f"{name}(job, {keywords[1]}, ...), where `job` is from `with paceline.join() as job`.",
    )


def _refuse_keyword(
    name: str, word: str, keywords: list[str], elsewhere: Callable[..., Any] | None
) -> None:
    what = f"{name} has no argument {word!r}."
    if elsewhere is not None and word in inspect.signature(elsewhere).parameters:
        raise ConfigError(what, fix=f"give it to {elsewhere.__qualname__}: {word}=...")
    near = get_close_matches(word, keywords, n=1, cutoff=_SIMILARITY)
    meant = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        what,
        fix=f"{meant}its arguments are {', '.join(k for k in keywords if k != '_')}.",
    )
