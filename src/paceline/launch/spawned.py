"""The first function of a process that a script starts with `torch.multiprocessing.spawn`.

The process has the variables of its rank. If it sets a port of its own, it must not meet at the launcher's
store. This is a file of its own because the process imports it by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def run(function: Callable[..., Any], *args: Any) -> Any:
    """Call the script's function."""
    from paceline.launch.worker import meet_at_port, watch_environment

    watch_environment(meet_at_port)
    return function(*args)
