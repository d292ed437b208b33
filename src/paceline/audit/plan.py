"""What one run of the user's script is for, as the harness in each rank reads it from the environment."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

VARIABLE = "PACELINE_VERIFY"

# What the ranks are given:
#   solo      one process, as the script is; what it trains on is kept for the other runs
#   ordinary  several processes, as the script is
#   mirrored  each rank is given the batches of the solo run: all quantities must be those of N = 1
#   dealt     the batches of the solo run are cut among the ranks: the same, for scripts that do so
Mode = Literal["solo", "ordinary", "mirrored", "dealt"]


@dataclass(frozen=True)
class RunPlan:
    """One run.

    Attributes:
        folder: Where its ranks write.
        mode: What the ranks are given.
        world_size: How many ranks.
        steps: Optimizer steps after which its training loaders end.
        solo: Folder of the run whose batches a mirrored or dealt one replays.
        bitwise: Whether paceline's reproducible mode is turned on.
    """

    folder: Path
    mode: Mode
    world_size: int
    steps: int
    solo: Path | None = None
    bitwise: bool = False

    @property
    def replays(self) -> bool:
        """Whether the ranks are given what the solo run saw."""
        return self.mode in ("mirrored", "dealt")

    def to_environment(self) -> dict[str, str]:
        """As an environment variable for the ranks."""
        return {VARIABLE: json.dumps(asdict(self), default=str)}

    @classmethod
    def from_environment(cls) -> RunPlan:
        """The plan of the run that this rank is in."""
        facts = json.loads(os.environ.pop(VARIABLE))
        for name in ("folder", "solo"):
            facts[name] = Path(facts[name]) if facts[name] else None
        return cls(**facts)
