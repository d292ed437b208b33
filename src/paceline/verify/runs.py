"""Runs the user's script under `paceline run`, watched, and ends it where nothing moves any more."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from paceline.audit import evidence
from paceline.audit.evidence import Run, RunPlan

_POLL_S = 0.25
_END_S = 20.0
_OUTPUT_CHARS = 200_000


def execute(plan: RunPlan, script: Sequence[str], *, hang_after_s: float, timeout_s: float) -> Run:
    """Run the script with its arguments as planned, and read what its ranks wrote.

    Args:
        script: The script and its arguments, or "-m", a module and its arguments.
        hang_after_s: How long no rank may write or compute before the run counts as hung.
        timeout_s: How long it may take in all.

    Raises:
        OSError: the launcher could not be started.
    """
    plan.folder.mkdir(parents=True)
    environ = {**os.environ, **plan.to_environment(), "PACELINE_BEFORE": "paceline.verify.harness"}
    # fmt: off
    command = [
        sys.executable, "-m", "paceline", "run", "--nproc-per-node", str(plan.world_size),
        "--max-restarts", "0", *script,
    ]
    # fmt: on
    output = plan.folder / "output.txt"
    with open(output, "wb") as file:
        launcher = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            hung, late = _watch(launcher, plan, hang_after_s, timeout_s)
        finally:
            _end(launcher)
    text = output.read_text(errors="replace")[-_OUTPUT_CHARS:]
    ranks = evidence.read(plan.folder, plan.world_size)
    return Run(plan, ranks, launcher.returncode, text, hung, late)


def _watch(
    launcher: subprocess.Popen[bytes], plan: RunPlan, hang_after_s: float, timeout_s: float
) -> tuple[bool, bool]:
    """Wait for the end; (nothing moved for too long, the time was up)."""
    started = moved = time.monotonic()
    last = (-1, -1)
    busy = os.sysconf("SC_CLK_TCK")
    while launcher.poll() is None:
        now = time.monotonic()
        if now - started > timeout_s:
            return False, True
        logs = list(plan.folder.glob("rank*.jsonl"))
        written = sum(path.stat().st_size for path in logs)
        ticks = sum(_ticks(path) for path in logs)
        # A rank that waits in a collective wakes now and then; less than a second is no work.
        if written != last[0] or ticks > last[1] + busy or len(logs) < plan.world_size:
            last, moved = (written, ticks), now
        if now - moved > hang_after_s:
            return True, False
        time.sleep(_POLL_S)
    return False, False


def _ticks(log: Path) -> int:
    """CPU time that a rank and its loader workers have used, in clock ticks."""
    total = 0
    with suppress(OSError, ValueError, KeyError), open(log) as file:
        pid = json.loads(file.readline())["pid"]
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for process in (pid, *children):
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """End the launcher, which ends its ranks."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if launcher.poll() is not None:
            return
        launcher.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(_END_S)
