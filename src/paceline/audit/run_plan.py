"""The plan of one run of the script: how many processes, which data, how many steps."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

_VARIABLE = "PACELINE_VERIFY"

# The data that the ranks get:
#   solo        one process with the data of the script
#   ordinary    several processes with the data of the script; their batches and weights are saved
#   union       one process with the batches of the ranks of the ordinary run; in kept steps and in
#               evaluations, with their weights
#   null        the same once more, with the samples in another order and other random numbers: what differs
#               between the two is rounding and chance
Mode = Literal["solo", "ordinary", "union", "null"]
UNIONS = ("union", "null")


@dataclass(frozen=True)
class RunPlan:
    """One run of the script.

    Attributes:
        folder: Where its ranks write.
        steps: The optimizer steps to watch.
        source: The folder of the ordinary run, for a union.
        bitwise: Whether paceline's reproducible mode is turned on.
        begun_s: When the solo run began, in seconds since 1970.
        cut_at: The step after which the solo run cut the first pass over a loader; None if it did not.
        kept: The steps, from 0, from whose weights a union begins anew.
        ranks: How many of the ranks of the ordinary run a union has the batches of.
        one_by_one: Whether a union gives their batches one after the other, and does not join them.
    """

    folder: Path
    mode: Mode
    world_size: int
    steps: int
    source: Path | None = None
    bitwise: bool = False
    cut_at: int | None = None
    begun_s: float = 0.0
    kept: tuple[int, ...] = ()
    ranks: int = 1
    one_by_one: bool = False

    def to_environment(self) -> dict[str, str]:
        """The plan as an environment variable for the ranks."""
        return {_VARIABLE: json.dumps(asdict(self), default=str)}

    @classmethod
    def from_environment(cls) -> RunPlan:
        """The plan of this rank's run; the variable is removed."""
        facts = json.loads(os.environ.pop(_VARIABLE))
        for name in ("folder", "source"):
            facts[name] = Path(facts[name]) if facts[name] else None
        return cls(**facts)
