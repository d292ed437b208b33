"""torch's elastic agent with our ranks: stopped cleanly, and diagnosed when they fail.

A subclass of torch's `LocalElasticAgent`, which does rendezvous, rank assignment, restarts, file timers and
health checks. This file replaces its documented methods that start, watch and stop processes.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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
from torch.distributed.elastic.multiprocessing import LogsDest, ProcessFailure

from paceline import torch_private
from paceline.errors import name_ranks
from paceline.job.network import (
    VARIABLES,
    Route,
    interface_variables,
    is_loopback,
    ports_outside,
    route_to,
)
from paceline.launch import failure_report
from paceline.launch.hang_watch import HangWatch
from paceline.launch.local_ranks import (
    LocalRanks,
    Rank,
    RankSpec,
    choose_threads,
    count_of,
    environment_of_ranks,
    has_probe,
)
from paceline.launch.messages import JobInfo, render_failure, render_restart
from paceline.launch.node_exchange import NodeExchange
from paceline.launch.nodes import NodeRendezvous
from paceline.launch.options import LaunchOptions
from paceline.launch.output import LogFile
from paceline.launch.signals import ReceivedSignals
from paceline.machine import read_memory
from paceline.watch.crash import FirstFailure, RankOutcome, find_first_failure
from paceline.watch.rank_state import last_call

# How long preempted ranks of other nodes may still need the store. All ranks stop after the same step.
_PREEMPTED_WAIT_S = 5.0
_EXIT_BARRIER_S = 300.0  # torch's own default

Wrap = Callable[[int, tuple[str, ...]], tuple[str, ...]]
_TORCH = torch_private.AGENT
_RESTARTS_LEFT = f"{_TORCH}._remaining_restarts"


class Agent(LocalElasticAgent):
    """Runs the ranks of one node, again after each restart. A round is the time between two restarts.

    Args:
        wrap: Puts words before the command of a local rank, such as those of numactl.

    Attributes:
        first_failure: Of the last round; None if it did not end by a known failure.
        interrupted_at: Where the first rank was that ended by KeyboardInterrupt; empty if there is none.
        preempted: Whether the ranks asked that the job be started again.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        options: LaunchOptions,
        local_ranks: LocalRanks,
        signals: ReceivedSignals,
        wrap: Wrap | None,
    ) -> None:
        logs = options.config.logs_specs
        assert logs is not None
        super().__init__(spec, logs, exit_barrier_timeout=_EXIT_BARRIER_S)
        self._logs = logs
        self._options = options
        self._local_ranks = local_ranks
        self._signals = signals
        self._threads, self._threads_note = choose_threads(spec.local_world_size)
        self._wrap = wrap
        self._has_failed_log = False
        self.first_failure: FirstFailure | None = None
        self.interrupted_at = ""
        self.preempted = False
        self._memory = read_memory()
        # None if it is switched off, or if the ranks are not Python.
        self._watch: HangWatch | None = None
        if has_probe() and options.is_python:
            args = options.args
            ends = args.on_hang == "end"
            self._watch = HangWatch(local_ranks, after_s=args.hang_after, ends=ends)
        self._exchange: NodeExchange | None = None

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # The store of the last round closes its port when the last reference to it is gone.
        torch_private.set_attribute(f"{_TORCH}._store", self, None)
        worker_group.store = None
        rendezvous: Any = torch_private.find(f"{_TORCH}._rendezvous")
        with self._signals.interruptible():
            rendezvous(self, worker_group)
        self._exchange = None
        if (node_count := worker_group.group_world_size or 1) > 1:
            node: Any = worker_group.group_rank
            if self._node_rendezvous is not None:
                self._exchange = self._node_rendezvous.exchange(node, node_count)
            else:
                store: Any = worker_group.store
                prefix = f"paceline/{self._restarts}"
                self._exchange = NodeExchange(PrefixStore(prefix, store), node, node_count)
        if self._watch is not None:
            self._watch.exchange = self._exchange

    def _announce(self, group: WorkerGroup, node_count: int) -> None:
        world_size = group.workers[0].world_size
        where = " on localhost"
        if node_count > 1:
            here = name_ranks([worker.global_rank for worker in group.workers])
            where = f" on {node_count} nodes, {here} on this one"
        parts = [
            f"{count_of(world_size, 'rank')}{where}",
            self._threads_note,
            f"store {group.master_addr}:{group.master_port}",
            f"at most {count_of(group.spec.max_restarts, 'restart')}",
            self._pids(),
        ]
        if not self._options.is_python:
            parts.append("--no-python: a failing rank reports only its exit code")
        for text in (*self._options.notes, *self._network_notes(node_count), ", ".join(parts)):
            self._local_ranks.say(text)

    def _pids(self) -> str:
        return "pids " + " ".join(str(rank.pid) for rank in self._local_ranks.ranks)

    def _network_notes(self, node_count: int) -> Iterator[str]:
        """What the user should know about the network between the nodes."""
        if node_count == 1:
            return
        route = self._route
        if route is not None and not is_loopback(route.address):
            kept = [name for name in VARIABLES if name in os.environ]
            but = f", except where {', '.join(kept)} is set" if kept else ""
            interface = f"{route.interface} ({route.address})"
            yield f"Gloo, NCCL and TensorPipe use {interface}, which {route.why}{but}"
        elif route is None and self._options.endpoint is not None:
            host = self._options.endpoint.host
            yield f"no interface of this host leads to {host}: Gloo and NCCL choose theirs"
        if self._options.ports is not None:
            yield from ports_outside(self._options.ports)
        if self._node_rendezvous is not None:
            yield from self._node_rendezvous.wrong_clocks()

    def _exit_barrier(self) -> None:
        # torch's own barrier would also wait for launchers that have stopped their ranks and will not come.
        if self.preempted:
            self._wait_for_nodes(_PREEMPTED_WAIT_S)
        else:
            with self._signals.interruptible(ranks_ended=True):
                self._wait_for_nodes(_EXIT_BARRIER_S)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._memory = read_memory()
        environments = {
            worker.local_rank: self._environment(worker_group, worker)
            for worker in worker_group.workers
        }
        if setup := torch_private.find(f"{_TORCH}._setup_local_watchdog"):
            setup(self, environments)
        if setup := torch_private.find(f"{_TORCH}._setup_healthcheck"):
            setup(self)
        logs = self._logs.reify(environments) if self._options.uses_logs else None
        specs = [
            self._rank_spec(worker_group, worker, environments[worker.local_rank], logs)
            for worker in worker_group.workers
        ]
        self._local_ranks.start(specs)
        if not self._local_ranks.has_begun:
            self._local_ranks.has_begun = True
            self._announce(worker_group, worker_group.group_world_size or 1)
        else:
            self._local_ranks.say(f"restarted ranks on this host: {self._pids()}")
        return {rank.local_rank: rank.pid for rank in self._local_ranks.ranks}

    def _rank_spec(
        self, group: WorkerGroup, worker: Any, variables: dict[str, str], logs: LogsDest | None
    ) -> RankSpec:
        local_rank = worker.local_rank
        command = self._options.command_of(local_rank)
        filtered = self._options.shown_local_ranks
        shown = filtered is None or local_rank in filtered
        spec = RankSpec(
            local_rank=local_rank,
            rank=worker.global_rank,
            command=command if self._wrap is None else self._wrap(local_rank, command),
            environment=environment_of_ranks(self._threads) | variables,
            is_python=self._options.is_python,
            prefix=self._prefix(group, worker),
            # Progress bars need a terminal, and only one rank may draw them.
            terminal=local_rank == 0 and logs is None,
            shown=(shown, shown),
        )
        return spec if logs is None else self._with_logs(spec, logs)

    def _with_logs(self, spec: RankSpec, logs: LogsDest) -> RankSpec:
        """Apply torch's log options: files and tees."""
        rank = spec.local_rank
        files: list[LogFile | None] = []
        shown: list[bool] = []
        for paths, tees, is_shown in (
            (logs.stdouts, logs.tee_stdouts, spec.shown[0]),
            (logs.stderrs, logs.tee_stderrs, spec.shown[1]),
        ):
            path = paths[rank]
            is_file = path not in ("", os.devnull)
            files.append(LogFile(path, self._log_failed) if is_file else None)
            tee = tees.get(rank, os.devnull) != os.devnull
            shown.append(is_shown and (not path or tee))
        return replace(spec, logs=(files[0], files[1]), shown=(shown[0], shown[1]))

    def _log_failed(self, text: str) -> None:
        if not self._has_failed_log:
            self._has_failed_log = True
            self._local_ranks.say(f"the log file {text}; the job goes on without it")

    def _prefix(self, group: WorkerGroup, worker: Any) -> str:
        template = self._options.config.log_line_prefix_template
        if template is not None:
            return Template(template).safe_substitute(
                role_name=group.spec.role, rank=worker.global_rank, local_rank=worker.local_rank
            )
        return f"[{worker.global_rank}] " if worker.world_size > 1 else ""

    def _environment(self, group: WorkerGroup, worker: Any) -> dict[str, str]:
        spec, nodes = group.spec, self._node_rendezvous
        # torch sets the same variables in `_start_workers`, which this class replaces.
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
            # Equal on all nodes, also on one that joined later: the ranks use it in the keys of their store.
            "TORCHELASTIC_RESTART_COUNT": self._restarts if nodes is None else nodes.round,
            "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
        }
        environment = {name: str(value) for name, value in environment.items()}
        environment["LOCAL_RANK"] = str(worker.local_rank)
        if set_devices := torch_private.find(f"{_TORCH}._set_local_rank_env"):
            set_devices(self, environment, worker.local_rank, spec)
        if (route := self._route) is not None:
            return interface_variables(route, os.environ) | environment
        return environment

    @functools.cached_property
    def _route(self) -> Route | None:
        """From this node to the others; None if it is not known."""
        endpoint = self._options.endpoint
        return None if endpoint is None else route_to(endpoint.host)

    @property
    def _max_restarts(self) -> int:
        return int(self.get_worker_group().spec.max_restarts)

    @property
    def _restarts_left(self) -> int:
        left = torch_private.attribute(_RESTARTS_LEFT, self)
        return 0 if left is None else int(left)

    @property
    def _restarts(self) -> int:
        return self._max_restarts - self._restarts_left

    @property
    def _node_rendezvous(self) -> NodeRendezvous | None:
        handler = self.get_worker_group().spec.rdzv_handler
        return handler if isinstance(handler, NodeRendezvous) else None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        local = self._local_ranks
        local.wait_change(self._options.config.monitor_interval)
        self._signals.check()
        for number in self._signals.take_for_ranks():
            local.forward_signal(number)
        if self._restarts_left > 0:
            local.kill_suspended()  # without restarts they are kept: the user may still resume them
        done = local.done  # read first: a rank may end badly between the two
        if local.any_ended_badly:
            return self._fail()
        if done and local.preempted and self._node_waits():
            local.clean_up()
            return RunResult(state=WorkerState.HEALTHY)  # torch's loop sees the node, and restarts
        if done and self._may_end_round():
            self.preempted = local.preempted
            if self._exchange is not None:
                # Ranks of other nodes may fail because these have ended.
                self._exchange.publish_outcomes(local.outcomes())
            local.clean_up()
            results = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=results)
        other_failed = self._exchange is not None and self._exchange.other_node_failed()
        # If the other node ends its ranks for a hang, this node prints the hang first.
        if (
            self._is_hanging(worker_group.workers[0].world_size, finish=other_failed)
            or other_failed
        ):
            return self._fail()
        if self._node_rendezvous and (self._restarts_left > 0 or done):
            if lost := self._node_rendezvous.lost():
                return self._lose_round(f"lost {', '.join(lost)}: no sign of life")
            if self._restarts_left > 0 and self._node_rendezvous.is_excluded():
                return self._lose_round("this node did not respond, and the others continued")
        return RunResult(state=WorkerState.HEALTHY)

    def _may_end_round(self) -> bool:
        """Whether this node, whose ranks have ended well, need not wait for other nodes any more.

        Their ranks have ended too, or are not awaited: after a preemption, a lost store, or 300 s. Tells the
        other nodes that the ranks of this one have ended. Ranks of other nodes may wait for ranks of this
        node; their launchers then need its outcomes.
        """
        try:
            if (
                self._exchange is None
                or self._local_ranks.preempted
                or self._exchange.publish_done()
            ):
                return True
        except RuntimeError:
            # With our own rendezvous, torch's loop notices that it is lost.
            return self._node_rendezvous is None
        # torch's static and etcd rendezvous do not notice lost nodes, so torch's timeout is the limit.
        now = time.time()
        ended_at = max((rank.ended_at for rank in self._local_ranks.ranks), default=now)
        return self._node_rendezvous is None and now - ended_at > _EXIT_BARRIER_S

    def _is_hanging(self, world_size: int, *, finish: bool) -> bool:
        """Whether a hang has to end this round; marks the ranks that cause it."""
        if self._watch is None:
            return False
        try:
            hang = (self._watch.conclude_pending if finish else self._watch.check)(world_size)
        except Exception as error:  # a defect of the diagnosis must not end the job
            self._local_ranks.say(f"the detection of hangs is off: {error!r}")
            self._watch = hang = None
        if hang is None:
            return False
        for rank in self._local_ranks.ranks:
            rank.hung = rank.rank in hang.culprits
        return True

    def _stop_after_failure(self) -> tuple[list[Rank], list[RankOutcome], int]:
        """Stop the ranks after a failure.

        Returns:
            The ranks of this node, the outcomes of other nodes' ranks, and how many nodes did not answer.
        """
        local, exchange = self._local_ranks, self._exchange

        def signalled() -> bool:
            return bool(self._signals.received)

        def enough(outcomes: Sequence[RankOutcome]) -> bool:
            first = find_first_failure(outcomes)
            if first is None or not first.certain:
                return False
            return exchange is None or first.original.returncode is not None

        if exchange is not None:
            exchange.announce_failure()
        if local.any_ended_badly:
            local.settle(enough, skip_grace=signalled)
        first = find_first_failure(local.outcomes())
        if self._restarts_left <= 0 or (first is not None and self._repeats(first)):
            local.request_states()
        elsewhere: list[RankOutcome] = []
        silent = 0
        if exchange is not None:
            elsewhere, silent = exchange.exchange_outcomes(local.outcomes(), signalled)
        grace_s = self._options.grace_s(may_save=False)
        local.stop(signal.SIGTERM, grace_s=grace_s, skip_grace=signalled, may_save=False)
        return local.clean_up(), elsewhere, silent

    def _fail(self) -> RunResult:
        """End this round after a failure, and report the failure."""
        ranks, elsewhere, silent = self._stop_after_failure()
        outcomes = [rank.outcome() for rank in ranks]
        first = find_first_failure([*outcomes, *elsewhere])
        if first is None:
            self._local_ranks.say(
                "a rank of another node failed; its launcher did not report the error"
            )
            self.first_failure = None
            return RunResult(state=WorkerState.FAILED)
        repeated = self._repeats(first)
        if repeated:
            torch_private.set_attribute(_RESTARTS_LEFT, self, 0)
        self.first_failure = first
        info = self._job_info(ranks, silent_nodes=silent, repeated=repeated)
        if self._restarts_left <= 0:
            self._report(ranks, outcomes, render_failure(first, info))
        elif any(each.failed and each.error is not None for each in outcomes):
            self._report(ranks, outcomes, render_failure(first, info), render_restart(first, info))
        else:
            self._local_ranks.show(render_restart(first, info))
        failures = {
            outcome.rank: ProcessFailure(
                local_rank=rank.local_rank,
                pid=outcome.pid,
                exitcode=outcome.returncode or 1,
                error_file="",
            )
            for rank, outcome in zip(ranks, outcomes, strict=True)
            if outcome.failed
        }
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _job_info(
        self, ranks: Sequence[Rank], *, silent_nodes: int = 0, repeated: bool = False
    ) -> JobInfo:
        return JobInfo(
            world_size=self.get_worker_group().workers[0].world_size,
            restarts=self._restarts,
            max_restarts=self._max_restarts,
            silent_nodes=silent_nodes,
            repeated=repeated,
            memory=(self._memory, read_memory()),
            calls={
                rank.rank: last_call(rank.answers.get("state", {}), rank.outcome().place)
                for rank in ranks
            },
        )

    def _repeats(self, first: FirstFailure) -> bool:
        return self.first_failure is not None and first.repeats(self.first_failure)

    def _report(
        self,
        ranks: Sequence[Rank],
        outcomes: Sequence[RankOutcome],
        text: str,
        shown: str | None = None,
    ) -> None:
        """Write the report of a failed round to a folder, and show its text, or `shown`, with the folder."""
        try:
            path = failure_report.write(ranks, outcomes, text, self._options.args.log_dir)
            where = f"tracebacks, stacks and the last output of the ranks here are in {path}"
        except OSError as error:
            where = f"stacks and logs could not be written: {error}"
        self._local_ranks.show(f"{shown or text}  {where}\n")

    def _lose_round(self, why: str) -> RunResult:
        self.first_failure = None
        may_restart = self._restarts_left > 0
        restart = f"restart {self._restarts + 1} of {self._max_restarts} begins"
        what_next = (
            restart if may_restart else "the ranks of this node had already ended with exit code 0"
        )
        self._local_ranks.say(f"{why}; {what_next}")
        self._stop_ranks(signal.SIGTERM, may_save=False)
        return RunResult(state=WorkerState.UNHEALTHY if may_restart else WorkerState.FAILED)

    def _node_waits(self) -> bool:
        """Whether a node wants to join, and this launcher has received no signal."""
        nodes = self._node_rendezvous
        return not self._signals.received and nodes is not None and nodes.node_waits()

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        if not self._local_ranks.ranks:
            return
        # torch calls this if a node wants to join. No rank has failed, so a training may save first.
        self._local_ranks.say("a node joins: all ranks stop, and begin again with it")
        self._stop_ranks(signal.SIGTERM, may_save=True)
        self.preempted = False

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any
    ) -> None:
        self._stop_ranks(death_sig, may_save=bool(self._signals.received))
        if self.preempted:
            self._wait_for_nodes(_PREEMPTED_WAIT_S)
        shutdown: Any = torch_private.find(f"{_TORCH}._shutdown")
        shutdown(self, death_sig, *args, **kwargs)

    def _wait_for_nodes(self, timeout_s: float) -> None:
        """Wait until the ranks of other nodes have ended; this process may serve their store."""
        if self._exchange is not None:
            self._exchange.wait_all_done(timeout_s, lambda: self._signals.skip_grace)
            self._exchange = None

    def _stop_ranks(self, number: signal.Signals, *, may_save: bool) -> None:
        local = self._local_ranks
        if not local.ranks:
            return
        local.stop(
            number,
            grace_s=self._options.grace_s(may_save=may_save),
            skip_grace=lambda: self._signals.skip_grace,
            may_save=may_save,
        )
        self.preempted = local.preempted
        ranks = local.clean_up()
        outcomes = [rank.outcome() for rank in ranks]
        at = next((each for each in outcomes if each.interrupted_at), None)
        if at is not None and not self.interrupted_at:
            self.interrupted_at = f"rank {at.rank} was at {at.interrupted_at}"
        if may_save:
            self._report_errors_of_end(ranks, outcomes)

    def _report_errors_of_end(self, ranks: Sequence[Rank], outcomes: Sequence[RankOutcome]) -> None:
        """Report errors of ranks that were told to save and end: what they should have saved may be lost."""
        first = find_first_failure(
            replace(each, stopped=each.error is None or each.follows) for each in outcomes
        )
        if first is not None:
            self._report(ranks, outcomes, render_failure(first, self._job_info(ranks)))
