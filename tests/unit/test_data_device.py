"""Batches of any structure are copied to a device; the meta device replaces a real one."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import torch

from paceline.data.device import to_device

META = torch.device("meta")


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Record:
    x: Any
    name: str


@dataclass
class Computed:
    """Has a field that is not an argument, and an argument that is not a field."""

    x: Any
    made: InitVar[int]
    y: Any = field(init=False)

    def __post_init__(self, made: int) -> None:
        self.y = torch.full((2,), made)


class Moving:
    def __init__(self, device: str) -> None:
        self.device = device

    def to(self, device: torch.device) -> Moving:
        return Moving(device.type)


def _x() -> torch.Tensor:
    return torch.ones(2)


def test_every_known_structure_is_kept_and_its_tensors_are_moved() -> None:
    assert to_device(_x(), META, pin=False).device == META
    batch = {
        "list": [_x(), (_x(), 3)],
        "pair": Pair(_x(), "text"),
        "record": Record(_x(), "name"),
        "computed": Computed(_x(), 3),
        "ordered": OrderedDict(a=_x()),
        "user": UserDict(a=_x()),
        "moving": Moving("cpu"),
        "none": None,
    }
    out = to_device(batch, META, pin=False)
    assert list(out) == list(batch)
    assert out["list"][0].device == out["list"][1][0].device == META
    assert (type(out["list"]), type(out["list"][1]), out["list"][1][1]) == (list, tuple, 3)
    assert (type(out["pair"]), out["pair"].x.device, out["pair"].y) == (Pair, META, "text")
    assert (type(out["record"]), out["record"].x.device) == (Record, META)
    assert out["computed"].x.device == out["computed"].y.device == META
    assert (type(out["ordered"]), out["ordered"]["a"].device) == (OrderedDict, META)
    assert (type(out["user"]), out["user"]["a"].device) == (UserDict, META)
    assert out["moving"].device == "meta"
    assert out["none"] is None
    # The batch itself may be the dataset's own and stays.
    assert batch["ordered"]["a"].device.type == "cpu"  # type: ignore[index]
    assert batch["user"]["a"].device.type == "cpu"  # type: ignore[index]
    assert batch["computed"].y.device.type == "cpu"  # type: ignore[attr-defined]
