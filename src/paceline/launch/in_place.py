"""`paceline run --recover in-place`: new processes in place of failed ranks, while the others keep theirs.

The ranks of a training that can go on say so ("recovers"). When one of them fails, the launcher lets a
standby process become that rank, waits until the collectives of the others have broken ("waits"), announces a
new generation of connections, and waits until all ranks have connected ("recovered"). If anything else
happens in between, all ranks start again.
A failure that repeats the last one ends the job. Any other one in the step that the last recovery repeats
may come from the recovery, such as a collective that only the new process calls: all ranks start again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from paceline.errors import name_ranks
from paceline.launch.local_ranks import Event, LocalRanks, Rank, RankSpec
from paceline.launch.signals import SignalReceived
from paceline.torch_private import COMPILER
from paceline.watch.crash import FirstFailure, RankOutcome, find_first_failure

# After these errors the state of the other ranks may be wrong too.
_UNSOUND = frozenset({"paceline.errors.RankDisagreement", "paceline.errors.NonFinite"})
# What a standby process imports. The first optimizer or DDP object imports torch's compiler.
_STANDBY = f"torch.distributed,{COMPILER},paceline.training.trainer"
_TURN_S = 0.1
_PATIENCE_S = 10.0  # if hangs are not detected


class _Impossible(Exception):
    """All ranks have to start again."""


class InPlace:
    """Replaces failed ranks of a job on one node.

    Args:
        check: Called often while ranks are awaited; may raise what ends the job.
        patience: Returns how many seconds a rank may take to notice a failure; 0 if hangs are not detected.
    """

    def __init__(
        self, local_ranks: LocalRanks, check: Callable[[], None], patience: Callable[[], float]
    ) -> None:
        self._local, self._check, self._patience = local_ranks, check, patience
        self._generation = 0
        self._specs: list[RankSpec] = []
        self._step: int | None = None  # after which the last recovery was; None before the first

    def begin_round(self, specs: list[RankSpec]) -> list[RankSpec]:
        """All ranks start: what they run."""
        self._generation, self._step = 0, None
        self._specs = [_in_generation(spec, 0) for spec in specs]
        return self._specs

    def keep_standby(self) -> None:
        """Start the standby process, once the ranks train and can be replaced."""
        local, first = self._local, self._specs[0]
        # The arguments of a process cannot be changed later.
        same = all(spec.command == first.command for spec in self._specs)
        if same and not local.has_standby and all(r.has_sent("recovers") for r in local.ranks):
            variables = dict(first.environment) | {"PACELINE_STANDBY": _STANDBY}
            local.start_standby(
                RankSpec(local_rank=-1, rank=-1, command=first.command, environment=variables)
            )

    @property
    def is_due(self) -> bool:
        """Whether a rank waits, because its collectives have broken, although none has ended."""
        return any(self._waits(rank) is not None for rank in self._local.ranks)

    def is_early(self, failure: FirstFailure) -> bool:
        """Whether it came before the ranks had done the step that the last recovery repeats."""
        return self._step is not None and failure.original.step in (0, self._step, self._step + 1)

    def recover(self, before: FirstFailure | None) -> tuple[bool, str, list[Rank]]:
        """Replace the ranks that have failed.

        Args:
            before: The failure before this one. One that repeats it is not recovered from.

        Returns:
            False if all ranks must start again, and `ranks` is as it was; what was done; and the processes
            that were replaced, or those in their place if all must start again.
        """
        local, began = self._local, time.monotonic()
        failed: list[Rank] = []
        new: list[Rank] = []
        try:
            self._await(
                lambda: all(r.returncode is not None or self._waits(r) for r in local.ranks)
            )
            failed = [rank for rank in local.ranks if not self._waits(rank)]
            step = max((e.step for r in local.ranks if (e := self._waits(r))), default=0)
            for rank in failed:
                rank.lost_in = step
            outcomes = local.outcomes(failed)
            self._refuse(outcomes, before)
            self._generation += 1
            for rank in failed:
                spec = _in_generation(self._specs[rank.local_rank], self._generation)
                new.append(local.replace(rank, spec))
            for rank in local.ranks:
                rank.send({"do": "recover", "generation": self._generation})
            self._await(lambda: all(map(self._has_recovered, local.ranks)), may_fail=False)
        except (_Impossible, OSError, SignalReceived) as error:
            local.put_back(failed)
            return False, f"no recovery in place: {error}", new
        local.forget(failed)
        self._step = max(e.step for r in local.ranks if (e := r.has_sent("recovered")))
        how = "the connections between the ranks broke; they have connected again"
        if (first := find_first_failure(outcomes)) is not None:
            pids = " ".join(str(rank.pid) for rank in new)
            ranks = name_ranks(rank.rank for rank in failed)
            how = f"{ranks} failed: {first.original.how}; replaced in place (pid {pids})"
        took_s = time.monotonic() - began
        return True, f"{how}, in {took_s:.1f} s, after step {self._step}", failed

    def _refuse(self, outcomes: list[RankOutcome], before: FirstFailure | None) -> None:
        """Refuse failures after which all ranks must start again."""
        if len(outcomes) == len(self._local.ranks):
            raise _Impossible("no rank is left")
        self._refuse_lost_peer()
        for each in outcomes:
            if each.error is not None and not _UNSOUND.isdisjoint(each.error.kinds):
                raise _Impossible(f"rank {each.rank} failed: {each.how}")
        if ended := [each.rank for each in outcomes if not each.failed]:
            raise _Impossible(f"{name_ranks(ended)} has ended")
        first = find_first_failure(outcomes)
        if first is not None and before is not None and first.repeats(before):
            raise _Impossible(
                f"rank {first.original.rank} failed in step {first.original.step} again"
            )
        if first is not None and self.is_early(first):
            raise _Impossible(
                f"rank {first.original.rank} failed in the step that the last one repeats"
            )

    def _refuse_lost_peer(self) -> None:
        """Refuse if a rank has ended because it lost a peer where it could not wait for a new one."""
        ranks = self._local.ranks
        if lost := [r.rank for r in ranks if r.ended_badly and r.outcome().follows]:
            raise _Impossible(f"{name_ranks(lost)} lost a peer outside of step.backward")

    def _waits(self, rank: Rank) -> Event | None:
        return rank.has_sent("waits", generation=self._generation + 1)

    def _has_recovered(self, rank: Rank) -> bool:
        return rank.has_sent("recovered", generation=self._generation) is not None

    def _await(self, is_so: Callable[[], bool], *, may_fail: bool = True) -> None:
        """Wait until something is so. Raises _Impossible if it cannot become so.

        Args:
            may_fail: Whether ranks may fail in the meantime.
        """
        local, began, is_told = self._local, time.monotonic(), False
        while not is_so():
            self._refuse_lost_peer()
            limit_s = self._patience() or _PATIENCE_S
            is_late = time.monotonic() - began > limit_s
            if is_late and not may_fail and not is_told:  # nothing limits how long a script starts
                is_told = True
                generation = self._generation
                new = [r for r in local.ranks if not r.has_sent("waits", generation=generation)]
                ranks = name_ranks(rank.rank for rank in new)
                local.say(f"{ranks} has not connected to the others after {limit_s:.0f} s")
            for rank in local.ranks:
                if rank.ended_badly and may_fail:
                    continue
                if rank.returncode is not None or rank.ended_badly:
                    raise _Impossible(f"rank {rank.rank} failed: {rank.outcome().how}")
                if rank.control_closed():
                    raise _Impossible(f"rank {rank.rank} has closed its socket to the launcher")
                if not rank.has_sent("recovers") and may_fail:
                    raise _Impossible(f"rank {rank.rank} cannot go on without a restart")
                if is_late and may_fail and not self._waits(rank):
                    rank.hung = not rank.has_sent("seen_error")  # else it may save its last step
                    raise _Impossible(
                        f"rank {rank.rank} has not noticed the failure after {limit_s:.0f} s"
                    )
            local.wait_change(_TURN_S)
            local.kill_suspended()
            self._check()


def _in_generation(spec: RankSpec, generation: int) -> RankSpec:
    """See `paceline.job.recovery`."""
    return replace(
        spec, environment=dict(spec.environment) | {"PACELINE_GENERATION": str(generation)}
    )
