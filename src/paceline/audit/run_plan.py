"""The plan of one run of the script: how many processes, which data, how many steps."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

_VARIABLE = "PACELINE_VERIFY"

# The data that the ranks get:
#   solo        one process with the data of the script; its batches are saved for the replays
#   ordinary    several processes with the data of the script
#   mirrored    a replay: each rank gets the batches of the solo run, so all results must equal those of it
#   divided     a replay: each rank gets a part of each batch of the solo run. It is used if the script
#               divides its batch size by the number of processes, or gathers values for its loss
#   same-weights  the data of the script, with the weights of the solo run in each evaluation and one seed for
#               all ranks. It is used if no batches can be replayed, or the replay took other steps, and
#               an evaluation exchanges results. The replays set these weights too
Mode = Literal["solo", "ordinary", "mirrored", "divided", "same-weights"]
REPLAYS = ("mirrored", "divided")


@dataclass(frozen=True)
class RunPlan:
    """One run of the script.

    Attributes:
        folder: Where its ranks write.
        steps: The optimizer steps to watch. If the solo run watches more, the plans of the later runs have as
            many as it took.
        solo: The folder of the run whose batches or weights a later run gets.
        bitwise: Whether paceline's reproducible mode is turned on.
        max_steps: The solo run doubles its steps up to so many as long as they are fast. The ordinary run is
            ended after so many, if they are more than `steps`.
        begun_s: When the solo run began, in seconds since 1970.
        cut_at: The step after which the solo run cut the first pass over a loader; None if it did not.
    """

    folder: Path
    mode: Mode
    world_size: int
    steps: int
    solo: Path | None = None
    bitwise: bool = False
    max_steps: int = 0
    cut_at: int | None = None
    begun_s: float = 0.0

    @property
    def last_steps(self) -> int:
        """The steps of the solo run that are left when it cuts a pass, to see the next one begin."""
        return (self.steps + 1) // 2

    @property
    def end(self) -> int:
        """The steps after which a later run than the solo run is ended."""
        return max(self.steps, self.max_steps)

    def to_environment(self) -> dict[str, str]:
        """The plan as an environment variable for the ranks."""
        return {_VARIABLE: json.dumps(asdict(self), default=str)}

    @classmethod
    def from_environment(cls) -> RunPlan:
        """The plan of this rank's run; the variable is removed."""
        facts = json.loads(os.environ.pop(_VARIABLE))
        for name in ("folder", "solo"):
            facts[name] = Path(facts[name]) if facts[name] else None
        return cls(**facts)
