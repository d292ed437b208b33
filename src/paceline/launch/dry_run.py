"""`paceline run --dry-run`: one process runs as a rank of a job whose other ranks do not exist."""

from __future__ import annotations

import os
import subprocess
import sys

from paceline.errors import ConfigError
from paceline.launch.options import LaunchOptions


def dry_run(options: LaunchOptions) -> int:
    """Run the script as one rank of `--dry-run N:RANK`; returns its exit code.

    `paceline.join` then makes process groups that communicate nothing. `--nproc-per-node` is the number of
    ranks on a host; by default all are on one.

    Raises:
        ConfigError: the option is malformed, or the numbers do not fit each other.
    """
    text = options.args.dry_run
    number, colon, rank_text = text.partition(":")
    if not number.isdecimal() or (colon and not rank_text.isdecimal()):
        raise ConfigError(f"--dry-run must be N or N:RANK, such as 64 or 64:5; got {text!r}.")
    world_size, rank = int(number), int(rank_text or 0)
    if rank >= world_size:
        raise ConfigError(f"--dry-run {text}: rank {rank} is not below the {world_size} ranks.")
    on_host = world_size if options.nproc == 1 else options.nproc
    if world_size % on_host:
        raise ConfigError(
            f"--dry-run {text}: --nproc-per-node {on_host} does not divide the {world_size} ranks."
        )
    if not options.is_python:
        raise ConfigError("--dry-run has no effect with --no-python.", fix="leave one of them out.")
    # Without the address of a store: a script that does not call `paceline.join` fails at
    # `init_process_group` in place of waiting for the other ranks.
    environ = {n: v for n, v in os.environ.items() if n not in ("MASTER_ADDR", "MASTER_PORT")}
    environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % on_host),
        "LOCAL_WORLD_SIZE": str(on_host),
        "PACELINE_DRY_RUN": "1",
    }
    module = ["-m"] if options.args.module else []
    words = [sys.executable, *module, options.script, *options.args.training_script_args]
    return subprocess.call(words, env=environ)
