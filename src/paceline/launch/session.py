"""One `paceline run` from its options to its exit code, after torch is imported.

Replaces `torch.distributed.launcher.api.launch_agent`: the same steps, with our agent, our rendezvous, and
without the launcher's stack in messages.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence

import torch
from torch.distributed import DistError
from torch.distributed.elastic import events, metrics
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
)
from torch.distributed.launcher.api import LaunchConfig

from paceline import torch_private
from paceline.errors import ConfigError, LaunchFailed
from paceline.exit_codes import ExitCode
from paceline.launch import signals
from paceline.launch.agent import Agent, Wrap
from paceline.launch.local_ranks import LocalRanks
from paceline.launch.node_facts import facts_of_this_node
from paceline.launch.nodes import NodeOptions, rendezvous_of_nodes
from paceline.launch.options import LaunchOptions, read_options
from paceline.launch.prescan import check_script
from paceline.launch.rendezvous import LocalRendezvous

# torch's loop sleeps this long before it calls `_monitor_workers`, which itself waits for events.
_LOOP_S = 0.001

# The launcher itself reports what these loggers warn of: a signal, or a host that ended first.
if "LOGLEVEL" not in os.environ:
    for name in ("agent.server.api", "rendezvous.dynamic_rendezvous"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.ERROR)


def launch(argv: Sequence[str], local_ranks: LocalRanks) -> int:
    """Run a job on this node; returns the exit code.

    Args:
        local_ranks: Starts the ranks.

    Raises:
        ConfigError: wrong options.
        ScriptError: the script is not valid Python.
        SystemExit: by torch's parser.

    Collective: one process of each node.
    """
    options = read_options(argv)
    if options.is_python:
        check_script(options.args.training_script, module=options.args.module)
    return _run(options, local_ranks)


def _run(options: LaunchOptions, local_ranks: LocalRanks) -> int:
    config = options.config
    wrap = _numa(config)

    def stuck(number: int) -> None:
        # The main thread waits in native code of torch, possibly for minutes, and cannot handle the signal.
        local_ranks.say(f"{signal.Signals(number).name} received while torch waits for other nodes")
        for rank in local_ranks.ranks:
            rank.kill()
        local_ranks.pump.drain(stalled_s=1.0)
        os._exit(128 + number)

    received_signals = signals.ReceivedSignals(stuck, on_signal=local_ranks.wake)
    local_ranks.has_signal = lambda: bool(received_signals.received)
    try:
        numbers = signals.parse(config.signals_to_handle)
    except ValueError as error:
        raise ConfigError(f"--signals-to-handle: {error}.") from error
    forced = config.signals_to_handle != signals.DEFAULT_SIGNALS
    with received_signals.handled(numbers, force=forced):
        try:
            if options.waiting_message:
                local_ranks.say(options.waiting_message)
            with received_signals.interruptible():
                rendezvous = _rendezvous(options, local_ranks)
        except SignalException as error:
            return 128 + error.sigval
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"the rendezvous options are not usable: {error}") from error
        except LaunchFailed as error:
            local_ranks.say(str(error))
            return ExitCode.FAILED
        except (RendezvousError, DistError) as error:
            return _rendezvous_failed(local_ranks, options, error)
        spec = _spec(options, rendezvous)
        agent = Agent(spec, options, local_ranks, received_signals, wrap)
        return _run_agent(agent, options, local_ranks, rendezvous)


def _run_agent(
    agent: Agent, options: LaunchOptions, local_ranks: LocalRanks, rendezvous: RendezvousHandler
) -> int:
    config = options.config
    metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
    stay_open = False
    try:
        result = agent.run()
        events.record(agent.get_event_succeeded(), config.event_log_handler)
        if result is not None and result.is_failed():
            first = agent.first_failure
            return first.exit_code if first is not None else ExitCode.FAILED
        # A preempted job is started again, and a closed rendezvous would refuse it.
        stay_open = agent.preempted
        return _preempted(local_ranks) if agent.preempted else ExitCode.OK
    except SignalException as error:
        # Closing the rendezvous would end the job on the other nodes.
        stay_open = True
        events.record(agent.get_event_failed(), config.event_log_handler)
        if agent.preempted:
            return _preempted(local_ranks)
        at = f"; {agent.interrupted_at}" if agent.interrupted_at else ""
        local_ranks.say(f"received {error.sigval.name}; all local ranks have ended{at}")
        return 128 + error.sigval
    except LaunchFailed as error:
        events.record(agent.get_event_failed(), config.event_log_handler)
        local_ranks.say(str(error))
        return ExitCode.FAILED
    except (RendezvousError, DistError) as error:
        events.record(agent.get_event_failed(), config.event_log_handler)
        return _rendezvous_failed(local_ranks, options, error)
    finally:
        if not stay_open:
            rendezvous.shutdown()


def _preempted(local_ranks: LocalRanks) -> int:
    local_ranks.say(
        f"preempted: all ranks have ended; exit code {ExitCode.PREEMPTED} requests a restart"
    )
    return ExitCode.PREEMPTED


def _rendezvous_failed(local_ranks: LocalRanks, options: LaunchOptions, error: Exception) -> int:
    config = options.config
    text = str(error).split("\n", 1)[0]
    where = (
        f"{config.rdzv_backend} rendezvous at {config.rdzv_endpoint}, id {config.run_id}, "
        f"{config.min_nodes} to {config.max_nodes} nodes"
    )
    if local_ranks.has_begun and isinstance(error, RendezvousClosedError):
        local_ranks.say("another node has ended the job; its launcher reports why")
        return ExitCode.FAILED
    if local_ranks.has_begun:
        lost = LaunchFailed(
            f"the rendezvous was lost: {type(error).__name__}",
            where=where,
            why="the host that serves it is gone or cannot be reached, or too few nodes came back.",
            fix="start the job again on all nodes: a training resumes from its last checkpoint "
            f"(schedulers can restart on exit code {ExitCode.UNAVAILABLE}).",
        )
        local_ranks.say(str(lost))
        return ExitCode.UNAVAILABLE
    is_gone = isinstance(error, RendezvousConnectionError)
    reason = "the connection to the rendezvous was lost" if is_gone else type(error).__name__
    failure = LaunchFailed(
        f"the nodes could not meet: {reason}{f': {text}' if text and not is_gone else ''}",
        where=where,
        why="the node that serves it has ended. If that was another job, give this one another port."
        if is_gone
        else "",
        fix="start `paceline run` on each node, with the same --nnodes, --rdzv-endpoint and "
        "--rdzv-id, and check that this node can reach that endpoint.",
    )
    local_ranks.say(str(failure))
    return ExitCode.FAILED


def _rendezvous(options: LaunchOptions, local_ranks: LocalRanks) -> RendezvousHandler:
    config = options.config
    if options.address is not None:
        host, port = options.address
        return LocalRendezvous(host, port, config.run_id)
    return rendezvous_of_nodes(
        RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            **config.rdzv_configs,
        ),
        _node_options(options, local_ranks),
    )


def _node_options(options: LaunchOptions, local_ranks: LocalRanks) -> NodeOptions | None:
    if options.endpoint is None:
        return None
    args = options.args
    return NodeOptions(
        endpoint=options.endpoint,
        facts=facts_of_this_node(
            number=options.node_rank,
            nodes=options.nnodes,
            script=args.training_script,
            is_file=options.is_python and not args.module,
        ),
        ports=options.ports,
        say=local_ranks.say,
    )


def _spec(options: LaunchOptions, rendezvous: RendezvousHandler) -> WorkerSpec:
    config = options.config
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        rdzv_handler=rendezvous,
        entrypoint=options.args.training_script,  # our agent takes the command from the options
        max_restarts=config.max_restarts,
        monitor_interval=_LOOP_S,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        virtual_local_rank=config.virtual_local_rank,
    )


def _numa(config: LaunchConfig) -> Wrap | None:
    """Puts numactl before a rank's command, as --numa-binding asks; None without the option."""
    options = config.numa_options
    if options is None:
        return None
    bind = torch_private.find("torch.numa.binding._maybe_wrap_command_args_with_numa_binding")
    if bind is None:
        raise ConfigError(
            "--numa-binding cannot be used with this torch.",
            where=f"torch {torch.__version__}",
            why="the function that builds the numactl command was renamed or removed.",
            fix="leave the option out, or start the script through numactl.",
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            "--numa-binding needs NVIDIA GPUs, and torch sees none here.",
            why="it binds each rank to the cores that are next to the rank's GPU.",
            fix="leave it out; to bind ranks of a CPU job, start the script through numactl or taskset.",
        )
    return lambda local_rank, command: bind(command, gpu_index=local_rank, numa_options=options)
