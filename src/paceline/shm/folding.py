"""Reductions of what different ranks gave: always in rank order, so that all get the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

# The operations are plain numbers here: torch's enumeration takes a microsecond to compare or to hash.
_MEMBERS: dict[str, Any] = dict(ReduceOp.RedOpType.__members__)
OPS = {name.lower(): int(op) for name, op in _MEMBERS.items()}
SUM, AVG = OPS["sum"], OPS["avg"]
_FUNCTIONS: dict[int, Callable[..., torch.Tensor]] = {
    SUM: torch.add,
    AVG: torch.add,
    OPS["product"]: torch.mul,
    OPS["min"]: torch.minimum,
    OPS["max"]: torch.maximum,
    OPS["band"]: torch.bitwise_and,
    OPS["bor"]: torch.bitwise_or,
    OPS["bxor"]: torch.bitwise_xor,
}
HALVES = (torch.bfloat16, torch.float16)
_FLOATS = (torch.float32, torch.float64, *HALVES)
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_BITS = (OPS["band"], OPS["bor"], OPS["bxor"])
_GROWS = (SUM, OPS["product"], AVG)
_KNOWN = {(op, dtype) for op in _FUNCTIONS if op != AVG for dtype in _WHOLE}
_KNOWN |= {(op, dtype) for op in _FUNCTIONS if op not in _BITS for dtype in _FLOATS}


def foldable(op: int, dtype: torch.dtype) -> bool:
    """Whether `fold` knows this operation on this dtype."""
    return (op, dtype) in _KNOWN


def fold(op: int, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Reduce flat tensors of one length into `out`, in the order given.

    16-bit floats are added and multiplied in float32 and rounded once. `out` may be a part where there
    are two.
    """
    function = _FUNCTIONS[op]
    # Two halves need no help: torch widens them itself and rounds once.
    widen = out.dtype in HALVES and op in _GROWS and (len(parts) > 2 or op == AVG)
    into = parts[0].float() if widen else out
    function(into if widen else parts[0], parts[1], out=into)
    for part in parts[2:]:
        function(into, part, out=into)
    if op == AVG:
        into.div_(len(parts))
    if widen:
        out.copy_(into)
