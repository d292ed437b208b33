"""One `paceline run` from its options to its exit code: rounds of ranks, each watched until it ends."""

from __future__ import annotations

import functools
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum
from string import Template
from typing import Any

from paceline.errors import LaunchFailed, count_of, name_ranks
from paceline.exit_codes import ExitCode
from paceline.job import preemption
from paceline.job.network import (
    VARIABLES,
    Route,
    interface_variables,
    is_loopback,
    route_to,
)
from paceline.launch import failure_report, signals
from paceline.launch.hang_watch import HangWatch
from paceline.launch.in_place import InPlace
from paceline.launch.local_ranks import (
    LocalRanks,
    Rank,
    RankSpec,
    choose_threads,
    environment_of_ranks,
    has_probe,
)
from paceline.launch.messages import JobInfo, render_failure, render_restart
from paceline.launch.node_exchange import NodeExchange
from paceline.launch.options import LaunchOptions
from paceline.launch.output import LogFile
from paceline.launch.rendezvous import (
    Change,
    Rendezvous,
    RendezvousClosed,
    RendezvousLost,
    Round,
    quiet_torch,
)
from paceline.machine import read_memory
from paceline.watch.crash import FirstFailure, RankOutcome, find_first_failure
from paceline.watch.rank_state import last_call

_TURN_S = 0.1  # longest time until the launcher reacts to a signal
_ENDED_WAIT_S = 300.0  # for the ranks of other nodes, as torchrun


def launch(options: LaunchOptions, local_ranks: LocalRanks) -> int:
    """Run a job on this node; returns the exit code.

    Raises:
        ConfigError: the store of the job cannot be served here.

    Collective: one process of each node.
    """

    received = signals.ReceivedSignals()
    local_ranks.has_signal = lambda: bool(received.received)
    with received.handled(signals.parse_signals(options.args.signals_to_handle)):
        try:
            rendezvous = _rendezvous(options, local_ranks, received)
        except signals.SignalReceived as error:
            return 128 + error.number
        except LaunchFailed as error:
            local_ranks.say(str(error))
            return ExitCode.FAILED
        except RendezvousLost as error:
            return _rendezvous_lost(local_ranks, options, error)
        return Supervisor(options, local_ranks, rendezvous, received).run()


def _rendezvous(
    options: LaunchOptions, local_ranks: LocalRanks, received: signals.ReceivedSignals
) -> Rendezvous:
    if options.endpoint is None:
        host, port = options.address
        return Rendezvous(host, port, ranks=options.nproc)
    low, high = options.min_nodes, options.max_nodes
    nodes = count_of(high, "node") if low == high else f"{low} to {high} nodes"
    note = ""
    if is_loopback(options.endpoint.host):
        note = " (only this host can reach it; set another host with --host)"
    local_ranks.say(f"waiting for {nodes} at {options.endpoint}{note}")
    with quiet_torch():
        from paceline.launch.nodes import NodeRendezvous
    with received.interruptible():
        return NodeRendezvous(options, local_ranks.say)


def _rendezvous_lost(local_ranks: LocalRanks, options: LaunchOptions, error: RendezvousLost) -> int:
    where = (
        f"rendezvous at {options.endpoint}, id {options.run_id}, {options.min_nodes} to "
        f"{options.max_nodes} nodes"
    )
    if local_ranks.has_begun and isinstance(error, RendezvousClosed):
        local_ranks.say("another node has ended the job; its launcher reports why")
        return ExitCode.FAILED
    if local_ranks.has_begun:
        lost = LaunchFailed(
            f"the rendezvous was lost: {error}",
            where=where,
            why="the host that serves it is gone or cannot be reached, or too few nodes came back.",
            fix="start the job again on all nodes: a training resumes from its last checkpoint "
            f"(schedulers can restart on exit code {ExitCode.UNAVAILABLE}).",
        )
        local_ranks.say(str(lost))
        return ExitCode.UNAVAILABLE
    failure = LaunchFailed(
        f"rendezvous failed: {error}",
        where=where,
        why="the node that serves it may have ended. If that was another job, give this one another port.",
        fix="start `paceline run` on each node, with the same --nnodes, --rdzv-endpoint and "
        "--rdzv-id, and check that this node can reach that endpoint.",
    )
    local_ranks.say(str(failure))
    return ExitCode.FAILED


class _Next(Enum):
    """What follows a round."""

    RESTART = "the ranks start again, which counts as a restart"
    JOIN = "the ranks start again with other nodes"
    END = "the job has ended"


class Supervisor:
    """Runs the ranks of one node, again after each restart."""

    def __init__(
        self,
        options: LaunchOptions,
        local_ranks: LocalRanks,
        rendezvous: Rendezvous,
        received: signals.ReceivedSignals,
    ) -> None:
        self._options = options
        self._local_ranks = local_ranks
        self._rendezvous = rendezvous
        self._signals = received
        self._threads, self._threads_note = choose_threads(options.nproc)
        self._restarts = 0
        self._max_restarts = int(options.args.max_restarts)
        self._exit_code = int(ExitCode.OK)
        self._first_failure: FirstFailure | None = None  # of the last round, if it is known
        self._interrupted_at = ""  # where the first rank was that ended by KeyboardInterrupt
        self._preempted = False  # the ranks asked that the job be started again
        self._has_trained = (
            False  # ranks of an earlier round save and end after a preemption signal
        )
        self._has_failed_log = False
        self._memory = read_memory()
        self._round: Round
        self._exchange: NodeExchange | None = None  # with the nodes of this round
        # None if it is switched off, or if the ranks are not Python.
        self._watch: HangWatch | None = None
        if has_probe() and options.is_python:
            args = options.args
            ends = args.on_hang == "end"
            self._watch = HangWatch(local_ranks, after_s=args.hang_after, ends=ends)
        self._in_place: InPlace | None = None
        if options.args.recover == "in-place":
            watch = self._watch
            self._in_place = InPlace(
                local_ranks, received.check, lambda: watch.patience_s if watch is not None else 0
            )

    def run(self) -> int:
        """Run all rounds; returns the exit code of the launcher."""
        job_ended = False  # whether nodes that come later are refused
        try:
            self._run_rounds()
            self._stop_ranks(signal.SIGTERM, may_save=False)
            # A preempted job is started again, and a closed rendezvous would refuse it.
            job_ended = not self._preempted
            return self._say_preempted() if self._preempted else self._exit_code
        except signals.SignalReceived as error:
            self._stop_ranks(error.number, may_save=True)
            if self._preempted:
                self._wait_for_nodes(self._options.grace_s(may_save=True))
                return self._say_preempted()
            if self._is_preempted_in_restart(error.number):
                self._local_ranks.say(
                    f"{error} during a restart; exit code {ExitCode.PREEMPTED} requests another one"
                )
                return ExitCode.PREEMPTED
            at = f"; {self._interrupted_at}" if self._interrupted_at else ""
            self._local_ranks.say(f"{error}; all local ranks have ended{at}")
            return 128 + error.number
        except LaunchFailed as error:
            self._stop_ranks(signal.SIGTERM, may_save=False)
            job_ended = True
            if self._exchange is not None:
                self._exchange.announce_failure()
            self._local_ranks.say(str(error))
            return ExitCode.FAILED
        except RendezvousLost as error:
            self._stop_ranks(signal.SIGTERM, may_save=False)
            return _rendezvous_lost(self._local_ranks, self._options, error)
        finally:
            self._rendezvous.close(job_ended=job_ended)

    def _is_preempted_in_restart(self, number: signal.Signals) -> bool:
        """Whether a preemption signal came before the ranks of a training had begun to train again."""
        trained = self._local_ranks.trained
        return self._has_trained and not trained and number in preemption.SIGNALS

    def _say_preempted(self) -> int:
        self._local_ranks.say(
            f"preempted: all ranks have ended; exit code {ExitCode.PREEMPTED} requests a restart"
        )
        return ExitCode.PREEMPTED

    def _run_rounds(self) -> None:
        while True:
            self._has_trained = self._has_trained or self._local_ranks.trained
            self._local_ranks.trained = False
            with self._signals.interruptible():
                self._round = self._rendezvous.next_round()
            self._exchange = self._round.exchange
            if self._watch is not None:
                self._watch.exchange = self._exchange
            try:
                self._start_ranks()
            except OSError as error:
                raise LaunchFailed(
                    f"the ranks of this node cannot be started: {error}.",
                    where=f"host {socket.gethostname()}",
                    fix="see that the folder of --log-dir can be written, and `ulimit -a`.",
                ) from error
            self._rendezvous.serve()
            after = None
            while after is None:
                after = self._after_turn()
            if after is _Next.END:
                self._wait_for_other_nodes()
                return
            if after is _Next.RESTART:
                self._restarts += 1

    def _wait_for_other_nodes(self) -> None:
        """Keep the store until the ranks of other nodes have ended, after the ranks here ended well."""
        if self._exit_code != ExitCode.OK or self._exchange is None:
            return
        if self._preempted:
            self._wait_for_nodes(self._options.grace_s(may_save=True))
        else:
            with self._signals.interruptible():
                self._wait_for_nodes(_ENDED_WAIT_S)

    @property
    def _restarts_left(self) -> int:
        return self._max_restarts - self._restarts

    def _start_ranks(self) -> None:
        self._memory = read_memory()
        count = range(self._options.nproc)
        variables = {local_rank: self._variables(local_rank) for local_rank in count}
        # Makes the folders of torch's log options, and adds the variable of the error file.
        logs = self._logs.reify(variables) if self._options.uses_logs else None
        specs = [self._spec(local_rank, variables[local_rank]) for local_rank in count]
        if logs is not None:
            specs = [self._with_logs(spec, logs) for spec in specs]
        if self._in_place is not None:
            specs = self._in_place.begin_round(specs)
        self._local_ranks.start(specs)
        pids = "pids " + " ".join(str(rank.pid) for rank in self._local_ranks.ranks)
        if self._local_ranks.has_begun:
            self._local_ranks.say(f"restarted ranks on this host: {pids}")
        else:
            self._local_ranks.has_begun = True
            self._announce(pids)

    def _announce(self, pids: str) -> None:
        here = self._round
        where = " on localhost"
        if here.nodes > 1:
            last = here.first_rank + self._options.nproc
            ranks = name_ranks(range(here.first_rank, last))
            where = f" on {here.nodes} nodes, {ranks} on this one"
        parts = [
            f"{count_of(here.world_size, 'rank')}{where}",
            self._threads_note,
            f"store {here.address}:{here.port}",
            f"at most {count_of(self._max_restarts, 'restart')}",
            pids,
        ]
        if not self._options.is_python:
            parts.append("--no-python: a failing rank reports only its exit code")
        for text in (*self._options.notes, *self._network_notes(), ", ".join(parts)):
            self._local_ranks.say(text)

    def _network_notes(self) -> Iterator[str]:
        """What the user should know about the network between the nodes."""
        if self._round.nodes == 1:
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

    def _spec(self, local_rank: int, variables: dict[str, str]) -> RankSpec:
        filtered = self._options.shown_local_ranks
        shown = filtered is None or local_rank in filtered
        grace = {preemption.GRACE_VARIABLE: f"{self._options.grace_s(may_save=True):.0f}"}
        return RankSpec(
            local_rank=local_rank,
            rank=self._round.first_rank + local_rank,
            command=self._options.command_of(local_rank),
            environment=environment_of_ranks(self._threads) | grace | variables,
            is_python=self._options.is_python,
            prefix=self._prefix(local_rank),
            # Progress bars need a terminal, and only one rank may draw them.
            terminal=local_rank == 0 and not self._options.uses_logs,
            shown=(shown, shown),
        )

    def _prefix(self, local_rank: int) -> str:
        rank = self._round.first_rank + local_rank
        template = os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
        if template is not None:
            return Template(template).safe_substitute(
                role_name=self._options.args.role, rank=rank, local_rank=local_rank
            )
        return f"[{rank}] " if self._round.world_size > 1 else ""

    def _variables(self, local_rank: int) -> dict[str, str]:
        """The variables of torchrun, and those that pin the interface."""
        here, options = self._round, self._options
        numbers = {
            "RANK": here.first_rank + local_rank,
            "LOCAL_RANK": local_rank,
            "GROUP_RANK": here.node,
            "ROLE_RANK": here.first_rank + local_rank,
            "WORLD_SIZE": here.world_size,
            "LOCAL_WORLD_SIZE": options.nproc,
            "GROUP_WORLD_SIZE": here.nodes,
            "ROLE_WORLD_SIZE": here.world_size,
            "MASTER_PORT": here.port,
            "TORCHELASTIC_RESTART_COUNT": here.number,
            "TORCHELASTIC_MAX_RESTARTS": self._max_restarts,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
        }
        variables = {name: str(number) for name, number in numbers.items()} | {
            "ROLE_NAME": options.args.role,
            "MASTER_ADDR": here.address,
            "TORCHELASTIC_RUN_ID": options.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        if options.args.virtual_local_rank:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            devices = visible.split(",") if visible else [str(n) for n in range(options.nproc)]
            if local_rank >= len(devices):
                raise LaunchFailed(
                    f"local rank {local_rank} has no GPU: CUDA_VISIBLE_DEVICES is {visible}.",
                    fix="start fewer ranks on this node, or make more GPUs visible.",
                )
            variables |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": devices[local_rank].strip()}
        if (route := self._route) is not None:
            return interface_variables(route, os.environ) | variables
        return variables

    @functools.cached_property
    def _route(self) -> Route | None:
        """From this node to the others; None if it is not known."""
        endpoint = self._options.endpoint
        return route_to(self._options.address[0] if endpoint is None else endpoint.host)

    @functools.cached_property
    def _logs(self) -> Any:
        with quiet_torch():
            from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
        args = self._options.args
        specs = DefaultLogsSpecs(
            args.log_dir, redirects=Std.from_str(args.redirects), tee=Std.from_str(args.tee)
        )
        if not args.log_dir:
            self._local_ranks.say(f"logs are in {specs.root_log_dir}")
        return specs

    def _with_logs(self, spec: RankSpec, logs: Any) -> RankSpec:
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

    def _after_turn(self) -> _Next | None:
        """Wait for a change, and check everything once; None if the round goes on."""
        local = self._local_ranks
        local.wait_change(_TURN_S)
        self._signals.check()
        # A process that has replaced another one would die of a signal until it trains.
        is_starting = any(rank.is_starting for rank in local.ranks)
        for number in () if is_starting else self._signals.take_for_ranks():
            if self._has_trained and not any(rank.trains for rank in local.ranks):
                raise signals.SignalReceived(number)  # they are still starting, and would die of it
            local.forward_signal(number)
        if self._restarts_left > 0:
            local.kill_suspended()  # without restarts they are kept: the user may still resume them
        done = local.done  # read first: a rank may end badly between the two
        if self._in_place is not None:
            self._in_place.keep_standby()
            if (local.any_ended_badly or self._in_place.is_due) and not self._recover():
                return self._fail()
        elif local.any_ended_badly:
            return self._fail()
        exchange = self._exchange
        # After a preemption the other nodes are not awaited, and may be gone.
        change = None if done and local.preempted else self._rendezvous.change()
        # A signal that came in the meantime lets the ranks save; a change does not always.
        self._signals.check()
        if change is not None and change.joins:
            # A node that joins waits if ranks have ended already: the job is about to end.
            has_ended = done or (exchange is not None and exchange.any_done())
            if change.has_begun or not has_ended:
                return self._restart_for_nodes(change.text)
        elif change is not None and (self._restarts_left > 0 or done):
            return self._lose_round(change)
        if done and self._may_end_round():
            self._preempted = local.preempted
            if exchange is not None:
                # Ranks of other nodes may fail because these have ended.
                exchange.publish_outcomes(local.outcomes())
            local.clean_up()
            return _Next.END
        other_failed = exchange is not None and exchange.other_node_failed()
        # If the other node ends its ranks for a hang, this node prints the hang first.
        if self._is_hanging(finish=other_failed) or other_failed:
            return self._fail()
        return None

    def _recover(self) -> bool:
        """Replace failed ranks while the others keep their processes; False if all must start again."""
        if self._restarts_left <= 0 or self._in_place is None:
            return False
        has_recovered, line, ended = self._in_place.recover(self._first_failure)
        outcomes = self._local_ranks.outcomes(ended)
        first = find_first_failure(outcomes)
        if first is not None and _has_traceback(outcomes):
            text = render_failure(first, self._job_info(ended))
            self._report(ended, outcomes, text, f"paceline: {line}\n")
        else:
            self._local_ranks.say(line)
        if has_recovered:
            self._restarts += 1
            self._first_failure = first
            self._memory = read_memory()
            self._has_trained = True
        return has_recovered

    def _may_end_round(self) -> bool:
        """Whether this node, whose ranks have ended well, need not wait for other nodes any more.

        Their ranks have ended too, or are not awaited after a preemption. Tells the other nodes that the
        ranks of this one have ended. Ranks of other nodes may wait for ranks of this node; their launchers
        then need its outcomes.
        """
        exchange = self._exchange
        if exchange is None or self._local_ranks.preempted:
            return True
        return exchange.publish_done()

    def _is_hanging(self, *, finish: bool) -> bool:
        """Whether a hang has to end this round; marks the ranks that cause it."""
        if self._watch is None:
            return False
        try:
            check = self._watch.conclude_pending if finish else self._watch.check
            hang = check(self._round.world_size)
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
        if self._in_place is not None:
            local.give_up_recovery()
        if local.any_ended_badly or self._in_place is not None:
            local.wait_for_reports(enough, skip_grace=signalled)
        first = find_first_failure(local.outcomes())
        if self._restarts_left <= 0 or (first is not None and self._repeats(first)):
            local.request_states()
        elsewhere: list[RankOutcome] = []
        silent = 0
        if exchange is not None:
            elsewhere, silent = exchange.exchange_outcomes(local.outcomes(), signalled)
        grace_s = self._options.grace_s(may_save=False)
        local.stop(
            signal.SIGTERM,
            grace_s=grace_s,
            skip_grace=lambda: self._signals.skip_grace,  # the ranks may save their last step
            may_save=False,
        )
        return local.clean_up(), elsewhere, silent

    def _fail(self) -> _Next:
        """End this round after a failure, and report the failure."""
        ranks, elsewhere, silent = self._stop_after_failure()
        outcomes = [rank.outcome() for rank in ranks]
        first = find_first_failure([*outcomes, *elsewhere])
        self._exit_code = ExitCode.FAILED if first is None else first.exit_code
        if first is None:
            self._local_ranks.say(
                "a rank of another node failed; its launcher did not report the error"
            )
            self._first_failure = None
            return self._restart_if_left()
        repeated = self._repeats(first)
        if repeated:
            self._max_restarts = self._restarts
        if self._in_place is None or not self._in_place.is_early(first):
            self._first_failure = first
        info = self._job_info(ranks, silent_nodes=silent, repeated=repeated)
        if self._restarts_left <= 0:
            self._report(ranks, outcomes, render_failure(first, info))
        elif _has_traceback(outcomes):
            self._report(ranks, outcomes, render_failure(first, info), render_restart(first, info))
        else:
            self._local_ranks.show(render_restart(first, info))
        return self._restart_if_left()

    def _restart_if_left(self) -> _Next:
        if self._restarts_left <= 0:
            return _Next.END
        self._exit_code = ExitCode.OK
        self._preempted = False
        return _Next.RESTART

    def _job_info(
        self, ranks: Sequence[Rank], *, silent_nodes: int = 0, repeated: bool = False
    ) -> JobInfo:
        return JobInfo(
            world_size=self._round.world_size,
            restarts=self._restarts,
            max_restarts=self._options.args.max_restarts,
            silent_nodes=silent_nodes,
            repeated=repeated,
            memory=(self._memory, read_memory()),
            calls={rank.rank: last_call(rank.state, rank.outcome().place) for rank in ranks},
        )

    def _repeats(self, first: FirstFailure) -> bool:
        return self._first_failure is not None and first.repeats(self._first_failure)

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

    def _lose_round(self, change: Change) -> _Next:
        self._first_failure = None
        self._exit_code = ExitCode.FAILED
        what_next = "the ranks of this node had already ended with exit code 0"
        if self._restarts_left > 0:
            what_next = f"restart {self._restarts + 1} of {self._max_restarts} begins"
        self._local_ranks.say(f"{change.text}; {what_next}")
        self._local_ranks.disconnect(change.lost)
        self._stop_ranks(signal.SIGTERM, may_save=False)
        return self._restart_if_left()

    def _restart_for_nodes(self, why: str) -> _Next:
        # No rank has failed, so a training may save first.
        self._local_ranks.say(f"{why}: all ranks stop and restart")
        self._stop_ranks(signal.SIGTERM, may_save=True)
        self._preempted = False
        return _Next.JOIN

    def _wait_for_nodes(self, timeout_s: float) -> None:
        """Wait until the ranks of other nodes have ended; this process may serve their store."""
        if self._exchange is not None:
            self._exchange.wait_all_done(timeout_s, lambda: self._signals.skip_grace)

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
        self._preempted = local.preempted
        ranks = local.clean_up()
        outcomes = [rank.outcome() for rank in ranks]
        at = next((each for each in outcomes if each.interrupted_at), None)
        if at is not None and not self._interrupted_at:
            self._interrupted_at = f"rank {at.rank} was at {at.interrupted_at}"
        if may_save:
            self._report_errors_of_end(ranks, outcomes)

    def _report_errors_of_end(self, ranks: Sequence[Rank], outcomes: Sequence[RankOutcome]) -> None:
        """Report errors of ranks that were told to save and end: what they should have saved may be lost."""
        first = find_first_failure(
            replace(each, stopped=each.error is None or each.follows) for each in outcomes
        )
        if first is not None:
            self._report(ranks, outcomes, render_failure(first, self._job_info(ranks)))


def _has_traceback(outcomes: Sequence[RankOutcome]) -> bool:
    """Whether a rank failed by an exception, whose traceback belongs in a report."""
    return any(each.failed and each.error is not None for each in outcomes)
