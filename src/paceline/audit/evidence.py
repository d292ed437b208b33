"""What the ranks of one run wrote down, read back and put in order. Nothing here judges."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.audit.plan import RunPlan

Event = dict[str, Any]

SENDS_BUFFERS = "DDP's broadcast of buffers"


@dataclass(frozen=True)
class RankLog:
    """One rank's events, in order; those of its loader workers apart.

    Attributes:
        fetches: Events "fetch" of the rank and its workers.
    """

    rank: int
    events: list[Event]
    fetches: list[Event]

    def of(self, *kinds: str) -> list[Event]:
        """The events of these kinds."""
        return [event for event in self.events if event["k"] in kinds]

    def first(self, kind: str) -> Event | None:
        """The first event of this kind."""
        return next((event for event in self.events if event["k"] == kind), None)

    @property
    def steps(self) -> int:
        """Optimizer steps of the optimizer that stepped first."""
        return max((event["s"] for event in self.of("stepped")), default=0)

    @property
    def ended(self) -> bool:
        """Whether the script came to an end of its own, well or by our limit."""
        return self.first("end") is not None

    @property
    def open_span(self) -> Event | None:
        """The collective or backward that this rank never came out of."""
        inside: list[Event] = []
        for event in self.of(
            "collective", "collective-end", "backward", "backward-end", "forward", "forward-end"
        ):
            if event["k"] == "forward":
                # DDP makes buffers equal at the beginning of it; all else in it is the rank's own work.
                inside.append({**event, "op": SENDS_BUFFERS} if event.get("sends_buffers") else {})
            elif event["k"].endswith("-end"):
                inside.pop()
            else:
                inside.append(event)
        return inside[-1] or None if inside else None

    def laps(self, loader: str) -> dict[int, list[Event]]:
        """The batches of a loader, by pass."""
        found: dict[int, list[Event]] = {}
        for event in self.of("batch"):
            if event["loader"] == loader:
                found.setdefault(event["lap"], []).append(event)
        return found

    @cached_property
    def loaders(self) -> dict[str, Event]:
        """The loaders' descriptions by name."""
        return {event["loader"]: event for event in self.of("loader")}

    @cached_property
    def training_loaders(self) -> list[str]:
        """Loaders whose batch was followed by a backward."""
        found: dict[str, None] = {}
        last = None
        for event in self.of("batch", "backward"):
            if event["k"] == "batch":
                last = event["loader"]
            elif last is not None:
                found[last] = None
        return list(found)


@dataclass(frozen=True)
class Run:
    """One run of the script.

    Attributes:
        returncode: The launcher's.
        output: What the script and the launcher printed, for a script that failed.
        hung: Whether it was stopped since nothing moved.
        out_of_time: Whether it was stopped since its time was up.
    """

    plan: RunPlan
    ranks: list[RankLog]
    returncode: int
    output: str = ""
    hung: bool = False
    out_of_time: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The run in words."""
        count = self.plan.world_size
        if self.plan.mode == "solo":
            return "the run of 1 process"
        return f"the {self.plan.mode} run of {count} processes"

    @property
    def steps(self) -> int:
        """Optimizer steps that every rank took."""
        return min((log.steps for log in self.ranks), default=0)

    def path(self, name: str) -> Path:
        """A file that the run left."""
        return self.plan.folder / name


def read(folder: Path, world_size: int) -> list[RankLog]:
    """The logs of a run's ranks; those that wrote nothing are empty."""
    logs = []
    for rank in range(world_size):
        events = list(_lines(folder / f"rank{rank}.jsonl"))
        fetches = [event for event in events if event["k"] == "fetch"]
        for path in sorted(folder.glob(f"child{rank}-*.jsonl")):
            fetches += _lines(path)
        logs.append(RankLog(rank, events, fetches))
    return logs


def _lines(path: Path) -> Iterator[Event]:
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return  # cut off when the rank was killed
