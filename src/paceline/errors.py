"""Every error that Paceline raises, as one tree, with one way to render them.

    PacelineError
    |-- ConfigError (ValueError)     wrong input, found before anything starts
    |-- LaunchFailed                 `paceline run` or `spawn` could not start or finish its ranks
    |-- DataError                    a dataset or a loader worker failed, or its samples cannot be used
    |-- StepError                    the training loop or an evaluation is used wrongly
    |-- NonFinite                    NaN or infinity in a loss or gradient
    |-- CheckpointError              a checkpoint that cannot be written or read
    |   `-- SaveFailed               the storage failed; exit code 74
    |-- RankDisagreement (RuntimeError)   ranks hold different values of what must be equal; exit code 70
    |-- PeerFailed (RuntimeError)    another rank failed first, so this one cannot go on
    `-- CollectiveTimeout (RuntimeError)  a rank did not arrive in time

Facts are attributes; the text is rendered from them, in four parts, and a part that is not known is
left out:

    <what was wrong>
      where: <rank, host, step>
      why:   <the mechanism>
      fix:   <one action>
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

from paceline.exit_codes import ExitCode

T = TypeVar("T")


def render(what: str, *, where: str = "", why: str = "", fix: str = "") -> str:
    """The four parts of an error or a note, as described above."""
    lines = [what]
    for label, text in (("where:", where), ("why:", why), ("fix:", fix)):
        if text:
            lines.append(f"  {label:<6} {text}")
    return "\n".join(lines)


class PacelineError(Exception):
    """Base of all errors of Paceline. Facts that a caller may test on are attributes.

    Attributes:
        exit_code: exit code of a rank that this error ends.
    """

    exit_code: int = ExitCode.FAILED
    # The documented attributes of a class; None in an error in which they are not known.
    attributes: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, what: str, *, where: str = "", why: str = "", fix: str = "", **facts: Any
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.fix = fix
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for names that it does not find otherwise. `facts` itself may be missing
        # while an instance is being unpickled.
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        if name in type(self).attributes:
            return None
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __str__(self) -> str:
        return render(self.what, where=self.where, why=self.why, fix=self.fix)

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"where": self.where, "why": self.why, "fix": self.fix, "facts": self.facts}
        return (type(self), (self.what,), state)


class ConfigError(PacelineError, ValueError):
    """Wrong input, found before anything starts (`variables`: those of a launcher, where they are wrong)."""

    attributes = ("variables",)


class LaunchFailed(PacelineError):
    """Ranks could not be started, or did not all finish (`rank`, `rank_exit_code`)."""

    attributes = ("rank", "rank_exit_code")


class DataError(PacelineError):
    """A dataset or a loader worker failed, or its samples cannot be used.

    Attributes:
        sample, samples: Those that could not be read or collated.
        rank, worker, worker_exit_code: Where it happened.
        original: The error of the dataset.
    """

    attributes = ("sample", "samples", "rank", "worker", "worker_exit_code", "original")


class StepError(PacelineError):
    """The training loop or an evaluation is used wrongly, such as a forgotten backward, a wrong loss,
    or a parameter without a gradient.

    Attributes:
        step: The number of the step.
        parameters: Those without a gradient, or with one that is not summed over ranks.
        count: The count that is wrong.
        seen: How many samples an evaluation has seen.
    """

    attributes = ("step", "parameters", "count", "seen")


class NonFinite(PacelineError):
    """NaN or infinity (`quantity`, `step`, `parameters`, `ranks`, and `samples` by rank, where known)."""

    attributes = ("quantity", "step", "parameters", "ranks", "samples")


class CheckpointError(PacelineError):
    """A checkpoint that cannot be written or read (`path`, `parameter`, `step` where known)."""

    attributes = ("path", "parameter", "step")


class SaveFailed(CheckpointError):
    """The storage failed, and the state could not be saved (`path`, `step`)."""

    exit_code = ExitCode.SAVE_FAILED


class RankDisagreement(PacelineError, RuntimeError):
    """Ranks hold different values of what must be equal, such as an argument or the weights of replicas, or
    a step that was computed again has other gradients.

    Attributes:
        values: Of an argument; one per rank.
        parameter, differing, ranks: The first weights that differ, how many do, and on which ranks.
        step, since: When replicas were found to differ, and the last step in which they were equal.
    """

    attributes = ("values", "parameter", "differing", "ranks", "step", "since")

    exit_code = ExitCode.RANKS_DIFFER


class PeerFailed(PacelineError, RuntimeError):
    """Another rank failed first, so this rank cannot go on (`rank`: the one that failed)."""

    attributes = ("rank",)


class CollectiveTimeout(PacelineError, RuntimeError):
    """A rank did not arrive in time (`missing`: ranks, `waited_s`)."""

    attributes = ("missing", "waited_s")


def listed(names: Sequence[str]) -> str:
    """The first five names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def count_of(number: int | str, what: str) -> str:
    """A number of things, such as `1 node` and `2 nodes`."""
    return f"{number} {what}{'' if str(number) == '1' else 's'}"


def name_ranks(ranks: Iterable[int], world_size: int | None = None) -> str:
    """Format ranks as "rank 3" or "ranks 0, 2-5 and 7"; as "all ranks" if all of `world_size` are named."""
    numbers = sorted(ranks)
    if len(numbers) == world_size:
        return "all ranks"
    runs: list[list[int]] = []
    for rank in numbers:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    if len(numbers) == 1:
        return f"rank {parts[0]}"
    return f"ranks {' and '.join(filter(None, [', '.join(parts[:-1]), *parts[-1:]]))}"


def group_by_text(things: Iterable[T], text_of: Callable[[T], str]) -> dict[str, list[T]]:
    """The things that have the same text, such as ranks that wait at the same line."""
    groups: dict[str, list[T]] = {}
    for thing in things:
        groups.setdefault(text_of(thing), []).append(thing)
    return groups


def refuse_different_values(
    what: str, values: Sequence[Any], *, where: str = "", fix: str = ""
) -> None:
    """Raise RankDisagreement unless the values of all ranks, in rank order, are equal.

    The error names the most frequent value first: "7 on ranks 0 and 1, 5 on rank 2".
    """
    if all(value == values[0] for value in values):
        return
    ranks_of = group_by_text(range(len(values)), lambda rank: json.dumps(values[rank]))
    groups = sorted(ranks_of.items(), key=lambda group: -len(group[1]))
    text = ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in groups)
    raise RankDisagreement(
        f'ranks hold different values of "{what}": {text}.',
        where=where,
        fix=fix,
        values=list(values),
    )


def rank_location(rank: int, world_size: int, *, step: int | None = None, detail: str = "") -> str:
    """Format where an error happened: rank, host, and the step and detail if given."""
    parts = [f"rank {rank} of {world_size}", f"host {socket.gethostname()}"]
    if step is not None:
        parts.append(f"step {step}")
    if detail:
        parts.append(detail)
    return ", ".join(parts)
