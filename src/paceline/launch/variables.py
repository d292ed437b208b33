"""Watches the environment variables that a script sets, in a rank and in the processes that it spawns.

Loaded by file name in a rank: the standard library alone. Spawned processes import it by name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any


def watch(apply: Callable[[str, str], None]) -> None:
    """Call `apply(name, value)` for each variable that the script sets.

    Wraps os.putenv, which os.environ calls; an audit hook would slow down every id() of the program.
    """
    putenv = os.putenv

    def watched(name: Any, value: Any) -> None:
        putenv(name, value)
        apply(os.fsdecode(name), os.fsdecode(value))

    os.putenv = watched


def meet_at_port(name: str, value: str) -> None:
    """If a script sets MASTER_PORT, its ranks do not meet at the store of the launcher."""
    # With this variable, rank 0 would connect to that port, where the launcher has opened no store.
    if name == "MASTER_PORT" and os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", ""):
        print(
            f"paceline: the script sets MASTER_PORT={value}, so its ranks meet there and not at the store of "
            "the launcher (TORCHELASTIC_USE_AGENT_STORE is removed)",
            file=sys.stderr,
        )


def run_spawned(run: Callable[[], Any]) -> Any:
    """Call `run` of a spawned process, which may set a port too."""
    watch(meet_at_port)
    return run()
