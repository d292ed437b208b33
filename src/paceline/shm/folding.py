"""Reductions of what different ranks gave: always in rank order, so that all get the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

_KIND: Any = ReduceOp.RedOpType  # its members are missing in torch's stubs
_FUNCTIONS: dict[Any, Callable[..., torch.Tensor]] = {
    _KIND.SUM: torch.add,
    _KIND.AVG: torch.add,
    _KIND.PRODUCT: torch.mul,
    _KIND.MIN: torch.minimum,
    _KIND.MAX: torch.maximum,
    _KIND.BAND: torch.bitwise_and,
    _KIND.BOR: torch.bitwise_or,
    _KIND.BXOR: torch.bitwise_xor,
}
HALVES = (torch.bfloat16, torch.float16)
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_BITS = (_KIND.BAND, _KIND.BOR, _KIND.BXOR)
_GROWS = (_KIND.SUM, _KIND.PRODUCT, _KIND.AVG)


def foldable(kind: Any, dtype: torch.dtype) -> bool:
    """Whether `fold` knows this operation on this dtype.

    Collective: none.
    """
    if dtype in _WHOLE:
        return kind in _FUNCTIONS and kind != _KIND.AVG
    floats = dtype in (torch.float32, torch.float64, *HALVES)
    return floats and kind in _FUNCTIONS and kind not in _BITS


def fold(kind: Any, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Reduce flat tensors of one length into `out`, in the order given.

    16-bit floats are added and multiplied in float32 and rounded once. `out` may be a part where there
    are two.

    Collective: none.
    """
    function = _FUNCTIONS[kind]
    # Two halves need no help: torch widens them itself and rounds once.
    widen = out.dtype in HALVES and kind in _GROWS and (len(parts) > 2 or kind == _KIND.AVG)
    into = parts[0].float() if widen else out
    function(into if widen else parts[0], parts[1], out=into)
    for part in parts[2:]:
        function(into, part, out=into)
    if kind == _KIND.AVG:
        into.div_(len(parts))
    if widen:
        out.copy_(into)
