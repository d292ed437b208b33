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
    NotBitwise,
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
# N ranks with a part of the data take at least this share of the steps of one process together.
_PART = 0.9


_OWN_FILE = "it read {} at {}, which an earlier run of this verification wrote."
_NO_RESUME = (
    "turn off resuming or saving during verification, or give each run a folder of its own."
)


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
        raise _refused(run, _hang(run), fix="give it more time with --hang-after.")
    if run.out_of_time:
        raise _refused(
            run,
            f"{run.name} did not end in time.",
            fix="give it more time with --timeout, or fewer steps with --steps.",
        )
    # Not the ranks with steps: one rank may step for all of them.
    alone = [log.rank for log in run.ranks if log.of(BackwardBegun)]
    if 0 < len(alone) < len(run.ranks) and any(log.first(EndedByVerify) for log in run.ranks):
        took = run.plan.steps
        raise _refused(
            run,
            f"in {run.name}, only {name_ranks(alone)} took the {took} steps that were watched.",
            why="these ranks may train something alone first, such as a teacher, while the others wait.",
            fix=f"watch the training that follows too, as with --steps {10 * took}.",
        )
    # After the wanted steps the loaders are empty, which may make the script fail.
    unfinished = [log for log in run.ranks if log.steps < run.plan.steps]
    if any(log.first(EndedByVerify) for log in run.ranks):
        return  # verification ended a rank, which may be why others failed
    failed = [log for log in unfinished if log.first(Failed)]
    if failed or (run.returncode and unfinished):
        raise _failure(run, failed)
    if run.steps == 0:
        raise _no_step(run)
    for log in unfinished:
        if not log.ended:
            raise _refused(
                run,
                f"rank {log.rank} ended after {log.steps} of {run.plan.steps} steps without an error: "
                "os._exit(), or an exit in native code.",
            )


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
            fix = "let the training reach its end"
            raise _refused(
                run,
                f"{'every rank' if everywhere else f'rank {log.rank}'} exits after {log.steps} of "
                f"{run.plan.steps} steps, in {run.name}.",
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
    # Each rank takes its part of an epoch, which is rounded in each pass.
    is_part = _PART * solo_steps <= steps * case.world_size and steps < solo_steps
    # The ranks read other batches, and their loaders end by themselves.
    shorter = is_part or case.ranks[0].training_loaders
    if solo_steps != steps and not shorter:
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
    error, message = failure.type, _message(failure)
    exit_ = log.first(ExitCalled) or ExitCalled(code=failure.code)
    refused = log.first(NotBitwise)
    if refused and refused.what == message:
        return Refused(
            f"--bitwise turns reproducible mode on, and it refused the training: {refused.what}",
            where=refused.at,
            why=refused.why,
            fix="leave --bitwise out.",
            output=[],
        )
    what = f"{error}: {message}" if error else f"sys.exit({exit_.code!r})"
    where, why = failure.place, ""
    start = log.first(RankStarted) or RankStarted()
    group = log.first(GroupInitialised) or GroupInitialised()
    needs_nccl = "nccl" in str(group.backend) and not log.steps
    in_cuda = failure.module.startswith("torch.cuda")
    if failure.module.startswith(("paceline.audit", "paceline.verify")):
        what = f"verification itself failed, which is a bug of paceline: {error}: {message}"
        fix = "report it with the script; the script is not known to be wrong."
    elif exit_.by == "argparse":
        what = "the script does not accept its arguments."
        fix = "options of `paceline verify` come before the script, its arguments after it."
    elif error == "EOFError":
        what, why = "the script reads its standard input.", "it has none during verification."
        fix = "pass the value as an argument."
    elif not start.cuda_devices and (in_cuda or needs_nccl):
        what = "the script needs a GPU, and this host has none."
        where = group.at if needs_nccl else where
        fix = "use a host with a GPU, or choose the device with torch.cuda.is_available()."
    elif (own := log.first(OwnFileRead)) is not None:
        what = f"the script failed in {run.name}: {what}"
        why, fix = _OWN_FILE.format(own.path, own.at), _NO_RESUME
    else:
        known = recognise(what)
        why, fix = (known.cause.why, known.cause.fix) if known else ("", "")
        if error == "AssertionError" and log.steps:
            why = "verification sets a seed before each forward, and ends passes over the data early, which "
            why += "may be the reason."
            fix = "if the script passes under torchrun, take the assertion out, or watch fewer --steps."
        what = f"the script failed in {run.name}: {what}"
    return _refused(run, what, where=where, why=why, fix=fix)


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
    load, own = log.first(StateLoaded), log.first(OwnFileRead)
    exit_ = log.first(ExitCalled) or ExitCalled()
    where, fix = "", "give `paceline verify` a script that trains, with its arguments after it."
    if any(each.of(BackwardBegun) for each in none):
        why = "it called backward, but stepped no torch.optim.Optimizer."
    elif (start := log.first(ProcessStarted)) is not None:
        where, why = start.at, "it started a process there, and verify cannot watch what that does."
        fix = "train in the process that verify starts, as torchrun does, not in one that the script starts."
    elif load is not None and own is not None:
        where, why, fix = load.at, _OWN_FILE.format(own.path, own.at), _NO_RESUME
    elif load is not None:
        where, why = load.at, "it loaded a state there, and had nothing left to train."
        fix = "turn off resuming during verification."
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
