"""Checks of arguments."""

from __future__ import annotations

import math
from typing import Any

from paceline.errors import ConfigError


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


def require_positive(**values: Any) -> None:
    """Refuse values that are not finite numbers above 0.

    Raises:
        ConfigError: for the first such value, under its keyword.
    """
    for name, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise ConfigError(f"{name} must be more than 0 and finite, got {value!r}.", option=name)
