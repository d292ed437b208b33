"""Makes a fork of a rank safe from the threads of Gloo, on Python 3.11.

When a collective has ended, a thread of Gloo frees its tensors. If Python has already dropped a tensor, the
thread enters Python for that, and for a moment holds a lock of the interpreter without the GIL. A process
that is forked in this moment inherits the locked lock and waits for it for ever. On a busy host, loader
workers hung so in about one of 4000 forks, with Python 3.11.7 and torch 2.13. Python 3.12 takes this lock
itself before it forks.
"""

from __future__ import annotations

import functools
import os
import sys
import time

# Longer than what a thread needs to free its tensors once it has a core.
_PAUSE_S = 0.001


def _let_threads_leave() -> None:
    """Give other threads the GIL and time, then wait until the lock is free."""
    time.sleep(_PAUSE_S)
    sys._current_frames()  # takes the lock of the list of threads and releases it


@functools.cache
def wait_before_forks() -> None:
    """Wait before each fork of this process from now on, if its Python needs it."""
    if sys.version_info < (3, 12):
        os.register_at_fork(before=_let_threads_leave)
