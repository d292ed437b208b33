"""Refuses runs that failed and cannot be judged, with the cause if it is known."""

from __future__ import annotations

from paceline.audit.events import (
    BackwardBegun,
    BatchGiven,
    EndedByVerify,
    EventOfPass,
    ExitCalled,
    Failed,
    Forked,
    GroupInitialised,
    OptimizerStepBegun,
    OwnFileRead,
    OwnRanksStarted,
    PassBegun,
    ProcessStarted,
    RankStarted,
    StateLoaded,
)
from paceline.audit.evidence import RankLog, Run, op_of
from paceline.audit.rules.rule import Case
from paceline.errors import PacelineError, name_ranks
from paceline.explain.reading import recognise

_TAIL_LINES = 30


class Refused(PacelineError):
    """The script failed or cannot be watched, so it was not judged. `output` has the end of its output."""


def refuse(run: Run) -> None:
    """Raise if a run did not train to its end.

    Raises:
        Refused: with the cause and a fix.
    """
    for log in run.ranks:
        if (spawns := log.first(OwnRanksStarted)) is not None:
            raise _refused(
                run,
                "the script starts its own ranks.",
                where=f"{spawns.call}, {spawns.at}",
                why="verify starts the ranks as torchrun does, and cannot watch those of the script.",
                fix="let the script train in its own process if the variable RANK is set, so that it also "
                "runs under torchrun.",
            )
        if (fork := log.first(Forked)) is not None:
            raise _refused(
                run,
                "the script forks.",
                where=fork.at,
                why="the copy of the rank has the same files and sockets, so its training cannot be "
                "distinguished from that of the rank.",
                fix="start processes with subprocess or torch.multiprocessing.",
            )
    if run.hung:
        if run.steps == 0 and any(log.first(ProcessStarted) for log in run.ranks):
            raise _no_step(run)
        raise _refused(run, _hang(run), fix="give it more time with --hang-after.")
    if run.out_of_time:
        fix = "give it more time with --timeout, or fewer steps with --steps."
        raise _refused(run, f"{run.name} did not end in time.", fix=fix)
    took = run.plan.steps
    is_cut = any(log.first(EndedByVerify) for log in run.ranks)
    # Not the ranks with steps: one rank may step for all of them.
    alone = [log.rank for log in run.ranks if log.of(BackwardBegun)]
    if is_cut and 0 < len(alone) < len(run.ranks):
        raise _refused(
            run,
            f"in {run.name}, only {name_ranks(alone)} took the {took} steps that were watched.",
            why="these ranks may train something alone first, such as a teacher, while the others wait.",
            fix=f"watch the training that follows too, as with --steps {10 * took}.",
        )
    if is_cut:
        return  # verification ended a rank, which may be why others failed
    # After the planned steps the loaders are empty, which may make the script fail.
    unfinished = [log for log in run.ranks if log.steps < took]
    failed = [log for log in unfinished if log.first(Failed)]
    if failed or (run.returncode and unfinished):
        raise _failure(run, failed)
    if run.steps == 0:
        raise _no_step(run)
    for log in unfinished:
        if not log.ended:
            what = f"rank {log.rank} ended after {log.steps} of {took} steps without an error: "
            raise _refused(run, what + "os._exit(), or an exit in native code.")


def refuse_early_exit(run: Run) -> None:
    """Raise if a rank called `sys.exit` during its training.

    Raises:
        Refused: with the line.
    """
    for log in run.ranks:
        exit_ = log.first(ExitCalled)
        if exit_ is None or log.steps >= run.plan.steps:
            continue
        # The exit itself leaves the pass, so later events do not count.
        before = log.events[: log.events.index(exit_)]
        passes = [e for e in before if isinstance(e, EventOfPass)]
        passes = [e for e in passes if e.loader in log.training_loaders]
        in_pass = not passes or isinstance(passes[-1], PassBegun | BatchGiven)
        if in_pass and exit_.in_loop:
            everywhere = all(each.of(ExitCalled) for each in run.ranks)
            who = "every rank" if everywhere else f"rank {log.rank}"
            fix = "let the training reach its end"
            raise _refused(
                run,
                f"{who} exits after {log.steps} of {run.plan.steps} steps, in {run.name}.",
                where=exit_.at,
                why="sys.exit() was called during the training.",
                fix=f"{fix}, or use --steps {log.steps}." if log.steps else f"{fix}.",
            )


def refuse_other_steps(case: Case) -> None:
    """Raise if the number of steps depends on the number of processes.

    On more processes an epoch may have fewer steps, down to a part of those of one.

    Raises:
        Refused: with both numbers.
    """
    if case.updates_differ:
        return
    # A run may take one step more than planned, where a loader is built in the loop.
    planned = case.ordinary.plan.steps
    solo_steps = min(planned, case.solo.steps)
    steps = min(planned, case.ordinary.steps)
    # Each rank takes 1/N of a pass, rounded down, which is more than 1/(N + 1) of N * (N + 1) steps. With
    # loaders, the ranks read other batches, and the loaders end by themselves.
    is_part = steps < solo_steps <= steps * (case.world_size + 1)
    if solo_steps != steps and not is_part and not case.ranks[0].training_loaders:
        raise Refused(
            f"the script takes {solo_steps} steps with 1 process and {steps} with {case.world_size}.",
            where=case.solo.ranks[0].of(OptimizerStepBegun)[-1].at,
            why="the runs take different numbers of steps, so their results cannot be compared.",
            fix="make the number of steps independent of the number of processes, or compare fewer: "
            f"--steps {min(solo_steps, steps)}.",
            output=[],
        )


def _failure(run: Run, failed: list[RankLog]) -> Refused:
    if not failed:
        return _refused(run, f"the script failed in {run.name} (exit code {run.returncode}).")
    # A rank may have failed only because another one did.
    log = next((each for each in failed if not _is_follower(each)), failed[0])
    failure = log.first(Failed) or Failed()
    exit_ = log.first(ExitCalled) or ExitCalled(code=failure.code)
    error = f"{failure.type}: {_message(failure)}" if failure.type else f"sys.exit({exit_.code!r})"
    what, where = f"the script failed in {run.name}: {error}", failure.place
    why, fix = _own_file(log)
    if not why and (known := recognise(error)):
        why, fix = known.cause.why, known.cause.fix
    start = log.first(RankStarted) or RankStarted()
    group = log.first(GroupInitialised) or GroupInitialised()
    needs_nccl = "nccl" in str(group.backend) and not log.steps
    in_cuda = failure.module.startswith("torch.cuda")
    if failure.module.startswith(("paceline.audit", "paceline.verify")):
        what = f"verification itself failed, which is a bug of paceline: {error}"
        fix = "report it with the script; the script is not known to be wrong."
    elif exit_.by == "argparse":
        what = "the script does not accept its arguments."
        fix = "options of `paceline verify` come before the script, its arguments after it."
    elif failure.type == "EOFError":
        what, why = "the script reads its standard input.", "it has none during verification."
        fix = "pass the value as an argument."
    elif not start.cuda_devices and (in_cuda or needs_nccl):
        what = "the script needs a GPU, and this host has none."
        where = group.at if needs_nccl else where
        fix = "use a host with a GPU, or choose the device with torch.cuda.is_available()."
    elif run.plan.bitwise and failure.type == "ConfigError" and "reproducible" in error:
        why, fix = "--bitwise turns reproducible mode on.", "leave --bitwise out."
    return _refused(run, what, where=where, why=why, fix=fix)


def _own_file(log: RankLog) -> tuple[str, str]:
    """The cause and the fix if the rank resumed from a file of an earlier run; empty if it did not."""
    if (own := log.first(OwnFileRead)) is None:
        return "", ""
    return (
        f"it read {own.path} at {own.at}, which an earlier run of this verification wrote.",
        "turn off resuming or saving during verification, or give each run a folder of its own.",
    )


def _message(failure: Failed) -> str:
    """The first line of the message of an error."""
    return next(iter(failure.message.strip().splitlines()), "")


def _is_follower(log: RankLog) -> bool:
    """Whether a rank's error is known to follow from the failure of another rank."""
    known = recognise(_message(log.first(Failed) or Failed()))
    return known is not None and known.cause.kind == "follower"


def _no_step(run: Run) -> Refused:
    none = [log for log in run.ranks if log.steps == 0]
    log = none[0]
    who = "the script" if len(none) == len(run.ranks) else f"rank {log.rank}"
    load, start = log.first(StateLoaded), log.first(ProcessStarted)
    exit_ = log.first(ExitCalled) or ExitCalled()
    where, fix = "", "give `paceline verify` a script that trains, with its arguments after it."
    if any(each.of(BackwardBegun) for each in none):
        why = "it called backward, but stepped no torch.optim.Optimizer."
    elif start is not None:
        where, why = start.at, "it started a process there, and verify cannot watch what that does."
        fix = "train in the process that verify starts, as torchrun does, not in one that the script starts."
    elif load is not None:
        where, why = load.at, "it loaded a state there, and had nothing left to train."
        fix = "turn off resuming during verification."
        if log.first(OwnFileRead):
            why, fix = _own_file(log)
    elif not log.ended:
        why = "it called os._exit(), or another program took its place (os.exec)."
    elif exit_.at:  # else the end of the rank itself
        why = f"it called sys.exit() at {exit_.at}."
    else:
        why = "it called no backward."
    what = f"{who} never took an optimizer step in {run.name}."
    return _refused(run, what, where=where, why=why, fix=fix)


def _hang(run: Run) -> str:
    parts = []
    for log in run.ranks:
        span = log.open_span
        call = "in no collective"
        if span is not None:
            call = f"in {op_of(span) or 'backward'} at {span.at}"
        parts.append(f"rank {log.rank} is {call}")
    return f"{run.name} made no progress: {', '.join(parts)}."


def _refused(run: Run, what: str, *, where: str = "", why: str = "", fix: str = "") -> Refused:
    tail = run.output.strip().splitlines()[-_TAIL_LINES:]
    return Refused(what, where=where, why=why, fix=fix, output=tail)
