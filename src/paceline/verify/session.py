"""Runs the script at each number of processes, then compares or audits the runs."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from paceline.audit import evidence
from paceline.audit.audit import AuditResult, Execute, audit
from paceline.audit.events import TrainingBuilt
from paceline.audit.evidence import Run
from paceline.audit.refusals import Refused, refuse, refuse_early_exit
from paceline.audit.rules.rule import Case
from paceline.audit.run_plan import RunPlan
from paceline.errors import ConfigError
from paceline.launch.local_ranks import choose_threads
from paceline.verify.compare import compare
from paceline.verify.forked_ranks import ForkedRanks, preload
from paceline.verify.report import VerifyResult, remarks_on, report

_POLL_S = 0.25
# The longest time of a later run: a script may wait in a busy loop for batches that it does not get there.
_LATER_S = 30.0
_LATER_FACTOR = 10  # by the longest of the runs before
# Waiting in a collective uses a little CPU time, but less than this.
_BUSY_S = 1.0
_OUTPUT_CHARS = 200_000
# With less space, a write of the recording may have failed: it flushes each line, and saves whole tensors.
_FULL_BYTES = 2**20
# Enough for two epochs of a small data set, and few enough for all runs to take seconds.
_STEPS = 100


@dataclass(frozen=True)
class VerifyOptions:
    """The options of `paceline verify`.

    Attributes:
        script: The script and its arguments, or "-m", a module and its arguments.
        counts: Numbers of processes; the first is 1.
        steps: Optimizer steps to watch; None for `_STEPS`.
        strict: Whether the notes of an audit are faults.
        bitwise: Whether paceline's reproducible mode is turned on and bits are compared.
        rtol: Relative difference that is allowed otherwise; None for the default of `compare`.
        hang_after_s: A run is hung if for this time no rank records an event or uses the CPU.
        timeout_s: The longest time for one run.
        keep: A new or empty folder for what the runs record; None for one that is deleted at the end.
    """

    script: Sequence[str]
    counts: Sequence[int]
    steps: int | None
    strict: bool
    bitwise: bool
    rtol: float | None
    hang_after_s: float
    timeout_s: float
    keep: Path | None = None


def verify(options: VerifyOptions, announce: Callable[[str], None]) -> VerifyResult:
    """Run the script at every number of processes, and judge it. `announce` gets a line for each run.

    Raises:
        Refused: the script failed, or cannot be judged.
        ConfigError: an option has no effect on this script, or the folder to keep is in use.
    """
    preload()
    # Not TemporaryDirectory, which a fork of this process would delete at its own end.
    folder = options.keep or Path(tempfile.mkdtemp(prefix="paceline-verify-"))
    if options.keep is not None:
        _make_empty(folder)
    try:
        longest_s = 0.0

        def run(plan: RunPlan) -> Run:
            nonlocal longest_s
            announce(f"{plan.mode}, {plan.world_size} process{'es' * (plan.world_size > 1)} ...")
            started = time.monotonic()
            made = _run(plan, replace(options, timeout_s=_timeout_s(plan, options, longest_s)))
            longest_s = max(longest_s, time.monotonic() - started)
            return made

        steps, begun_s = options.steps or _STEPS, time.time()
        plan = RunPlan(folder / "solo", "solo", 1, steps, bitwise=options.bitwise, begun_s=begun_s)
        solo = run(plan)
        refuse_early_exit(solo)
        refuse(solo)
        counts = [count for count in options.counts if count > 1]
        remarks = remarks_on(solo)
        uses_paceline = bool(solo.ranks[0].of(TrainingBuilt))
        if not uses_paceline:
            _refuse_options(options)
        audits: list[AuditResult] = []
        for count in counts:
            try:
                if uses_paceline:
                    audits.append(_compare(solo, count, run, options))
                else:
                    audits.append(audit(solo, count, run, folder, strict=options.strict))
            except Refused as refused:
                if not any(each.faults for each in audits):
                    raise
                remarks.append(f"with {count} processes it could not be verified: {refused.what}")
                break
        return report(audits, remarks)
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def _refuse_options(options: VerifyOptions) -> None:
    for name, option in (("--bitwise", options.bitwise), ("--rtol", options.rtol)):
        if option:
            raise ConfigError(
                f"{name} has no effect on a script that does not use paceline.",
                why="such a script is audited; its runs are not compared with each other.",
                fix=f"leave {name} out.",
            )


def _compare(solo: Run, count: int, execute: Execute, options: VerifyOptions) -> AuditResult:
    """Run a script that uses paceline on `count` processes, and compare it with the run of one."""
    folder = solo.plan.folder.parent / f"ordinary-{count}"
    several = execute(replace(solo.plan, mode="ordinary", world_size=count, folder=folder))
    refuse(several)
    judged = compare(solo, several, rtol=options.rtol, bitwise=options.bitwise)
    return AuditResult(Case(solo, several), judged)


def _make_empty(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_used, status = any(folder.iterdir()), folder.stat()
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}.") from error
    if is_used:
        raise ConfigError(f"the folder {folder} is not empty.", fix="give --keep a new folder.")
    if status.st_uid != os.getuid() or status.st_mode & 0o002:
        raise ConfigError(
            f"other users can write to the folder {folder}.",
            why="batches are kept there and unpickled.",
            fix="give --keep a new folder.",
        )


def _timeout_s(plan: RunPlan, options: VerifyOptions, longest_s: float) -> float:
    """The longest time for a run, if the longest of the runs before took `longest_s`."""
    if plan.source is None:
        return options.timeout_s
    return min(options.timeout_s, max(_LATER_S, _LATER_FACTOR * longest_s))


def _run(plan: RunPlan, options: VerifyOptions) -> Run:
    """Run the script as planned, and read what its ranks recorded."""
    plan.folder.mkdir(parents=True)
    output = plan.folder / "output.txt"
    output.touch()
    environ = plan.to_environment()
    # All runs have the threads of the largest one: sums then have one order. And on a busy machine, the
    # threads of one process would use much CPU time to wait for each other.
    threads, _ = choose_threads(max(options.counts))
    if threads is not None:
        environ["OMP_NUM_THREADS"] = threads
    ranks = ForkedRanks(plan.world_size, options.script, environ, output)
    try:
        end = _wait(ranks, plan, options)
    finally:
        ranks.end()
    if (left := shutil.disk_usage(plan.folder).free) < _FULL_BYTES:
        raise Refused(
            f"the disk of verification's own folder is full: {left} bytes are left at {plan.folder}.",
            why="what the runs recorded is not complete, and what they printed may have failed.",
            fix="free space there, or set TMPDIR to a folder on another disk.",
            output=[],
        )
    text = output.read_text(errors="replace")[-_OUTPUT_CHARS:]
    logs = evidence.read_logs(plan.folder, plan.world_size)
    return Run(plan, logs, ranks.returncode, text, end == "hung", end == "out of time")


def _wait(ranks: ForkedRanks, plan: RunPlan, options: VerifyOptions) -> str:
    """Wait until all ranks have ended (returns ""), the run is "hung" or the run is "out of time"."""
    started = progressed = time.monotonic()
    last_size = -1
    last_cpu_s: float | None = None
    while not ranks.wait(_POLL_S):
        now = time.monotonic()
        if now - started > options.timeout_s:
            return "out of time"
        logs = list(plan.folder.glob("rank*.jsonl"))
        size = sum(path.stat().st_size for path in logs)
        if size != last_size or len(logs) < plan.world_size:
            last_size, last_cpu_s, progressed = size, None, now
        else:
            cpu_s = _cpu_s(ranks.pids)
            if last_cpu_s is None or abs(cpu_s - last_cpu_s) > _BUSY_S:
                progressed = progressed if last_cpu_s is None else now
                last_cpu_s = cpu_s
        if now - progressed > options.hang_after_s:
            return "hung"
    return ""


def _cpu_s(ranks: Sequence[int]) -> float:
    """CPU time that the ranks and their loader workers have used."""
    total = 0.0
    for pid in ranks:
        with suppress(psutil.Error):
            rank = psutil.Process(pid)
            for process in (rank, *rank.children(recursive=True)):
                with suppress(psutil.Error):
                    used = process.cpu_times()
                    total += used.user + used.system
    return total
