"""Turns dropout off: with it, the result for a sample depends on the batch and on the number of processes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch.nn import functional

# The functions with dropout: name and position of the probability.
_PROBABILITIES = {
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"), ("p", 1)),
    "feature_alpha_dropout": ("p", 1),
    "scaled_dot_product_attention": ("dropout_p", 4),
}


def turn_off() -> Callable[[], None]:
    """Call these functions with probability 0 from now on, also where they are imported by name.

    Not from the start of a rank, because torch.jit.script cannot read a replaced function. The returned
    function puts them back.
    """
    replaced = []
    for name, place in _PROBABILITIES.items():
        function = getattr(functional, name)
        without = functools.wraps(function)(functools.partial(_without, function, *place))
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and not module.__name__.startswith("torch._"):
                for own in [key for key, value in vars(module).items() if value is function]:
                    setattr(module, own, without)
                    replaced.append((module, own, function))

    def turn_on() -> None:
        for module, name, function in replaced:
            setattr(module, name, function)

    return turn_on


def _without(
    function: Callable[..., Any], argument: str, position: int, *args: Any, **kwargs: Any
) -> Any:
    if len(args) > position:
        return function(*args[:position], 0.0, *args[position + 1 :], **kwargs)
    return function(*args, **{**kwargs, argument: 0.0})
