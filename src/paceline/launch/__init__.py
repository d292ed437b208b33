"""The launcher: `paceline run`, with the options of `torch.distributed.run` (torchrun).

- options.py: the command line.
- supervisor.py: one run, from its options to its exit code; rendezvous.py, and for several nodes nodes.py,
  endpoint.py and node_exchange.py.
- local_ranks.py starts and ends the ranks; output.py passes on what they print; guard.py is a process that
  ends the ranks if the launcher is killed.
- signals.py, hang_watch.py, messages.py and failure_report.py.
- worker.py is the first code of a rank.
- dry_run.py runs one rank of a job that does not exist.
- spawning.py starts ranks from a notebook, a debugger or a test, without `paceline run`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from paceline.command_line import check_script
from paceline.errors import ConfigError, LaunchFailed
from paceline.exit_codes import ExitCode
from paceline.launch.dry_run import dry_run
from paceline.launch.local_ranks import LocalRanks
from paceline.launch.options import read_options
from paceline.launch.output import Consoles
from paceline.launch.supervisor import launch

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """Run a script on several processes, with the arguments of `paceline run`; returns the exit code.

    The exit code is 0 if all ranks ended well; that of the rank that failed first; 128 + the signal that
    killed it, or that the launcher got; 2 for wrong input. Output goes to this process's standard output
    and error. Call it from the main thread, which receives signals.

    Collective: one process of each node.
    """
    local_ranks: LocalRanks | None = None
    try:
        options = read_options(argv)
        if options.is_python and not options.args.module:
            check_script(options.script)
        if options.args.dry_run is not None:
            return dry_run(options)
        local_ranks = LocalRanks(Consoles.of_this_process())
        return launch(options, local_ranks)
    except ConfigError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return ExitCode.USAGE
    except LaunchFailed as error:
        print(f"paceline: {error}", file=sys.stderr)
        return ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED  # the scripts had not begun yet
    finally:
        if local_ranks is not None:
            local_ranks.close()
