"""torch's elastic agent with ranks of ours: started early, stopped cleanly, and judged when they fail.

A front to `LocalElasticAgent`, which keeps rendezvous, rank assignment, restarts, file timers and health
checks. We replace how processes are started, watched and stopped.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, ProcessFailure
from torch.distributed.elastic.utils import macros

from paceline.launch import bundle
from paceline.launch.hang_watch import HangWatch
from paceline.launch.local_ranks import Crew
from paceline.launch.logs import connect_logs
from paceline.launch.messages import Shape, render_failure, render_restart
from paceline.launch.node_exchange import Hearsay
from paceline.launch.nodes import FreshRendezvous
from paceline.launch.signals import Signals
from paceline.machine import read_memory
from paceline.watch.crash import Fact, FirstFailure, find_first_failure
from paceline.watch.rank_state import last_call

_STAY_S = 5.0  # all ranks were stopped after one step; what they do then differs little


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the ranks do.

    Args:
        order: The script and its arguments, as worker.py takes them.
        environment: What each rank's environment has besides what torch's agent sets.
        start_crew: Starts a round of processes.
        announce: Called with the store's address when a round begins.
        begun: Whether a round has begun before.
        logs: Where torch's log options send output; None for the consoles alone.
        shown: Local ranks whose output the consoles show; None for all.
        prefix: Template of what stands before each line (`TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE`).
        grace_s: How long ranks may take to end when a peer failed.
        signal_grace_s: And when the launcher got a signal.
        log_dir: Where a failed job leaves its folder; None for the system's temporary one.
        watch: Finds hangs; None where the ranks are no Python of ours.
        spares: Whether to keep interpreters ready for a restart.
    """

    order: dict[str, Any]
    environment: dict[str, str]
    start_crew: Callable[[Crew], None]
    announce: Callable[[WorkerGroup], None]
    begun: Callable[[], bool]
    logs: LogsSpecs | None
    shown: frozenset[int] | None
    prefix: str | None
    grace_s: float
    signal_grace_s: float
    interval_s: float
    log_dir: str | None = None
    watch: HangWatch | None = None
    spares: bool


class Agent(LocalElasticAgent):
    """Runs the rounds of one node.

    Attributes:
        verdict: On the last round that failed.
        interrupted_at: Where a rank was that a KeyboardInterrupt ended.
        preempted: Whether the ranks ended to be started again.
    """

    def __init__(
        self, spec: WorkerSpec, logs: LogsSpecs, task: Task, crew: Crew, signals: Signals
    ) -> None:
        super().__init__(spec, logs)
        self._task = task
        self._crew = crew
        self._signals = signals
        self.verdict: FirstFailure | None = None
        self.interrupted_at = ""
        self.preempted = False
        self._memory = read_memory()
        self._watch = task.watch
        self._hearsay: Hearsay | None = None

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # The last round's store ends with the last reference to it.
        self._store = None
        worker_group.store = None
        if self._task.begun() and not self._crew.ranks:
            self._task.start_crew(self._crew)  # they import torch while the nodes meet
        with self._signals.interruptible():
            super()._rendezvous(worker_group)
        self._hearsay = None
        if (nodes := worker_group.group_world_size or 1) > 1:
            node: Any = worker_group.group_rank
            if self._meeting is not None:
                self._hearsay = self._meeting.hearsay(node, nodes)
            else:
                store: Any = self._store
                stem = f"paceline/{self._restarts}"
                self._hearsay = Hearsay(PrefixStore(stem, store), node, nodes)
        if self._watch is not None:
            self._watch.hearsay = self._hearsay
        self._task.announce(worker_group)

    def _exit_barrier(self) -> None:
        # torch's own waits in vain for launchers whose ranks were stopped.
        if self.preempted:
            self._stay(_STAY_S)
        else:
            with self._signals.interruptible():
                self._stay(self._exit_barrier_timeout)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if not self._crew.ranks:
            self._task.start_crew(self._crew)
        environments = {
            worker.local_rank: self._environment(worker_group, worker)
            for worker in worker_group.workers
        }
        self._setup_local_watchdog(environments)
        self._setup_healthcheck()
        world_size = worker_group.workers[0].world_size
        for worker in worker_group.workers:
            prefix = f"[{worker.global_rank}] " if world_size > 1 else ""
            if self._task.prefix is not None:
                prefix = Template(self._task.prefix).safe_substitute(
                    role_name=worker_group.spec.role,
                    rank=worker.global_rank,
                    local_rank=worker.local_rank,
                )
            for stream in self._crew.ranks[worker.local_rank].streams:
                stream.prefix = prefix.encode()
            self._crew.ranks[worker.local_rank].copy_window_size()
        if self._task.logs is not None:
            connect_logs(self._crew, self._task.logs, environments, worker_group.spec)
        for rank in self._crew.ranks:
            if self._task.shown is not None and rank.local_rank not in self._task.shown:
                for stream in rank.streams:
                    stream.console = None
        for worker in worker_group.workers:
            order = dict(self._task.order, env=environments[worker.local_rank])
            for words in ("argv", "command"):
                if words in order:
                    order[words] = macros.substitute(order[words], str(worker.local_rank))
            self._crew.order(worker.local_rank, worker.global_rank, order)
        return {rank.local_rank: rank.pid for rank in self._crew.ranks}

    def _environment(self, group: WorkerGroup, worker: Any) -> dict[str, str]:
        spec = group.spec
        # torch builds the same where it starts its own processes, out of reach for a subclass.
        environment: dict[str, Any] = {
            "RANK": worker.global_rank,
            "GROUP_RANK": group.group_rank,
            "ROLE_RANK": worker.role_rank,
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": spec.local_world_size,
            "WORLD_SIZE": worker.world_size,
            "GROUP_WORLD_SIZE": group.group_world_size,
            "ROLE_WORLD_SIZE": worker.role_world_size,
            "MASTER_ADDR": group.master_addr,
            "MASTER_PORT": group.master_port,
            # Equal on all nodes, also on one that came later: ranks meet under this number.
            "TORCHELASTIC_RESTART_COUNT": self._meeting.round if self._meeting else self._restarts,
            "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
        }
        environment = {name: str(value) for name, value in environment.items()}
        self._set_local_rank_env(environment, worker.local_rank, spec)
        return self._task.environment | environment

    @property
    def _restarts(self) -> int:
        return int(self._worker_group.spec.max_restarts - self._remaining_restarts)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._crew.wait_change(self._task.interval_s)
        self._signals.check()
        for number in self._signals.take_passing():
            self._crew.pass_on(number)
        if self._remaining_restarts > 0:
            self._crew.end_frozen()  # else there is hope that somebody has it go on
            if self._task.spares:
                self._crew.keep_spares()
        if self._crew.failing:
            return self._fail()
        if self._crew.done and self._crew.preempted and self._is_growing():
            self._crew.clear()
            self._crew.dismiss()
            return RunResult(state=WorkerState.HEALTHY)  # torch's loop sees who waits, and restarts
        if self._crew.done and self._is_over():
            self.preempted = self._crew.preempted
            self._crew.clear()
            if self._hearsay is not None:
                self._hearsay.tell(self._crew.facts())  # others may fail for want of these ranks
            self._crew.say_daemons()
            self._crew.dismiss()
            results = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=results)
        if self._hearsay is not None and self._hearsay.pending():
            return self._fail()
        if self._is_hanging(worker_group.workers[0].world_size):
            return self._fail()
        cares = self._remaining_restarts > 0 or self._crew.done
        if self._meeting and cares and (lost := self._meeting.lost()):
            return self._lose(f"lost {', '.join(lost)}: no sign of life")
        if self._meeting and self._remaining_restarts > 0 and self._meeting.is_expelled():
            return self._lose("this node stood still, and the others went on without it")
        timeout = getattr(self, "_uninterruptible_state_timeout", 0.0)
        if timeout > 0:
            stuck = self._check_stuck(timeout)
            if stuck is not None:
                return stuck
        return RunResult(state=WorkerState.HEALTHY)

    def _is_over(self) -> bool:
        """Whether nobody needs the ranks of this node any more, all of which have ended well.

        While ranks of other nodes go on they may wait for these, and then have to be told so.
        """
        try:
            if self._hearsay is None or self._crew.preempted or self._hearsay.all_done():
                return True
        except RuntimeError:
            return self._meeting is None  # else torch's loop finds that the rendezvous is lost
        # Where nothing tells that the others live, torch's patience is the limit.
        ended_at = max(rank.ended_at for rank in self._crew.ranks)
        return self._meeting is None and time.time() - ended_at > self._exit_barrier_timeout

    def _check_stuck(self, timeout: float) -> RunResult | None:
        for rank in self._crew.ranks:
            dwell = self._update_uninterruptible_dwell(
                rank.pid, self._worker_group.spec.role, timeout
            )
            if dwell is not None and dwell >= timeout:
                self._crew.say(
                    f"paceline: rank {rank.rank} (pid {rank.pid}) is stuck in the kernel for "
                    f"{dwell:.0f} s; no restart would help\n"
                )
                self._remaining_restarts = 0
                return RunResult(state=WorkerState.FAILED)
        return None

    def _is_hanging(self, world_size: int) -> bool:
        """Whether a hang is to end this round; its culprits are then marked."""
        if self._watch is None:
            return False
        try:
            hang = self._watch.look(world_size)
        except Exception as error:  # what explains a job must not end it
            self._crew.say(f"paceline: hangs are not looked for any more: {error!r}\n")
            self._watch = hang = None
        if hang is None:
            return False
        for rank in self._crew.ranks:
            rank.hung = rank.rank in hang.culprits
        return True

    def _fail(self) -> RunResult:
        crew, hearsay = self._crew, self._hearsay

        def hurry() -> bool:
            return bool(self._signals.received)

        def enough(facts: Any) -> bool:
            verdict = find_first_failure(facts)
            if verdict is None or not verdict.certain:
                return False
            return hearsay is None or verdict.original.returncode is not None

        if hearsay is not None:
            hearsay.begin()
        if crew.failing:
            crew.settle(enough, hurry=hurry)
        if self._remaining_restarts <= 0:
            crew.ask()
        if hearsay is not None:
            hearsay.tell(crew.facts())
        elsewhere, silent = hearsay.hear(hurry) if hearsay is not None else ([], 0)
        crew.stop(signal.SIGTERM, grace_s=self._task.grace_s, hurry=hurry, at_once=True)
        crew.clear()
        facts = crew.facts()
        verdict = find_first_failure([*facts, *elsewhere])
        if verdict is None:
            crew.say("paceline: another node has failed, and did not say of what\n")
            crew.dismiss()
            return RunResult(state=WorkerState.FAILED)
        again = self.verdict is not None and verdict.repeats(self.verdict)
        if again:
            self._remaining_restarts = 0
        self.verdict = verdict
        shape = Shape(
            world_size=self._worker_group.workers[0].world_size,
            restarts=self._restarts,
            max_restarts=self._worker_group.spec.max_restarts,
            nodes=1 + silent,
            again=again,
            memory=(self._memory, read_memory()),
            calls={rank.rank: last_call(rank.answer) for rank in crew.ranks},
        )
        if self._remaining_restarts > 0:
            crew.say(render_restart(verdict, shape))
        else:
            self._say_failure(facts, render_failure(verdict, shape))
        self._memory = shape.memory[1]
        failures = {
            fact.rank: ProcessFailure(
                local_rank=rank.local_rank,
                pid=fact.pid,
                exitcode=fact.returncode or 1,
                error_file="",
            )
            for rank, fact in zip(crew.ranks, facts, strict=True)
            if fact.failed
        }
        crew.say_daemons()
        crew.dismiss()
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _say_failure(self, facts: Sequence[Fact], text: str) -> None:
        try:
            path = bundle.write(self._crew.ranks, facts, text, self._task.log_dir)
            text += f"  stacks, collectives and logs of all ranks are in {path}\n"
        except OSError as error:
            text += f"  stacks and logs could not be kept: {error}\n"
        self._crew.say(text)

    def _lose(self, why: str) -> RunResult:
        again = self._remaining_restarts > 0
        restart = f"restart {self._restarts + 1} of {self._worker_group.spec.max_restarts} begins"
        then = restart if again else "the ranks of this node had ended well"
        self._crew.say(f"paceline: {why}; {then}\n")
        self._end_ranks(signal.SIGTERM, self._task.grace_s, at_once=True)
        return RunResult(state=WorkerState.UNHEALTHY if again else WorkerState.FAILED)

    @property
    def _meeting(self) -> FreshRendezvous | None:
        meeting = self._worker_group.spec.rdzv_handler
        return meeting if isinstance(meeting, FreshRendezvous) else None

    def _is_growing(self) -> bool:
        """Whether the ranks were stopped for a node that wants to join, and by nothing else."""
        return (
            not self._signals.received and self._meeting is not None and self._meeting.is_growing()
        )

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        if not self._crew.ranks:
            return
        # Nothing has failed; a node has come. A training saves before it ends.
        self._crew.say("paceline: a node joins: all ranks stop, and begin again with it\n")
        self._end_ranks(signal.SIGTERM, self._task.signal_grace_s, at_once=False)
        self.preempted = False

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any
    ) -> None:
        received = bool(self._signals.received)
        grace_s = self._task.signal_grace_s if received else self._task.grace_s
        self._end_ranks(death_sig, grace_s, at_once=not received)
        if self.preempted:
            self._stay(_STAY_S)
        super()._shutdown(death_sig, *args, **kwargs)

    def _stay(self, most_s: float) -> None:
        """Where ranks have ended well: let the other nodes see how theirs end, before the store may go."""
        if self._hearsay is not None:
            self._hearsay.stay(most_s, lambda: self._signals.hurry)
            self._hearsay = None

    def _end_ranks(self, number: signal.Signals, grace_s: float, *, at_once: bool) -> None:
        if not self._crew.ranks:
            return
        self._crew.stop(number, grace_s=grace_s, hurry=lambda: self._signals.hurry, at_once=at_once)
        self.preempted = self._crew.preempted
        self._crew.clear()
        self.interrupted_at = self._crew.interrupted_at()
        self._crew.dismiss()
