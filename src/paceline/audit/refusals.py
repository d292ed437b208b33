"""Refuses runs that failed and cannot be judged, with the cause if it is known."""

from __future__ import annotations

from paceline.audit.evidence import RankLog, Run
from paceline.errors import PacelineError

_TAIL_LINES = 30
_PASSES = ("iter", "pass-end", "pass-left")


class Refused(PacelineError):
    """The script itself failed, so it was not judged. The end of its output is in `output`."""


def refuse(run: Run) -> None:
    """Raise if a run did not train to its end.

    Raises:
        Refused: with the cause and a fix.
    """
    for log in run.ranks:
        fork = log.first("fork")
        if fork is not None:
            raise _refused(
                run,
                f"the script forks, at {fork['at']}.",
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
    failed = [log for log in run.ranks if _failed(log, run.plan.steps)]
    if failed or (
        run.returncode and not all(_made_all_steps(log, run.plan.steps) for log in run.ranks)
    ):
        _refuse_failed(run, failed)
    if run.steps == 0:
        raise _no_step(run)
    silent = [
        log.rank for log in run.ranks if not log.ended and not _made_all_steps(log, run.plan.steps)
    ]
    if silent:
        raise _refused(
            run,
            f"rank {silent[0]} ended after {run.ranks[silent[0]].steps} of {run.plan.steps} steps without an "
            "error: os._exit(), or an exit in native code.",
        )


def refuse_early_exit(run: Run) -> None:
    """Raise if a rank called `sys.exit` during its training.

    Raises:
        Refused: with the line.
    """
    for log in run.ranks:
        exits = log.of("exit")
        # The exit itself leaves the pass, so later events do not count.
        until = log.events.index(exits[0]) if exits else len(log.events)
        passes = [
            e
            for e in log.events[:until]
            if e["k"] in _PASSES and e["loader"] in log.training_loaders
        ]
        inside = bool(passes) and passes[-1]["k"] == "iter"
        without_loader = not passes and " in " in (exits[0]["at"] if exits else "")
        if exits and log.steps < run.plan.steps and (inside or without_loader):
            who = "every rank" if all(each.of("exit") for each in run.ranks) else f"rank {log.rank}"
            raise _refused(
                run,
                f"{who} exits after {log.steps} of {run.plan.steps} steps, in {run.name}.",
                where=exits[0]["at"],
                why="sys.exit() was called during the training.",
                fix=f"let the training reach its end, or use --steps {log.steps}."
                if log.steps
                else "let the training reach its end.",
            )


def _failed(log: RankLog, steps: int) -> bool:
    return log.first("failed") is not None and not _made_all_steps(log, steps)


def _made_all_steps(log: RankLog, steps: int) -> bool:
    """Whether the wanted steps were made. The loaders are empty then, which may make the script fail."""
    return log.steps >= steps


def _refuse_failed(run: Run, failed: list[RankLog]) -> None:
    first = failed[0].first("failed") if failed else None
    if first is None:
        raise _refused(run, f"the script failed in {run.name} (exit code {run.returncode}).")
    kind, text = first.get("type", ""), str(first.get("message", "")).strip().splitlines()
    what = f"{kind}: {text[0] if text else ''}" if kind else f"sys.exit({first.get('code')})"
    where = first.get("place", "")
    start = failed[0].first("start") or {}
    if kind == "EOFError":
        raise _refused(
            run,
            f"the script reads its standard input, at {where}.",
            why="it has no standard input during verification.",
            fix="pass the value as an argument.",
        )
    if _wants_gpu(failed[0]) and not start.get("cuda_devices"):
        init = failed[0].first("init") or {}
        where = init["at"] if "nccl" in str(init.get("backend")) else where
        raise _refused(
            run,
            f"the script needs a GPU, at {where}, and this host has none.",
            fix="use a host with a GPU, or choose the device with torch.cuda.is_available().",
        )
    raise _refused(run, f"the script failed in {run.name}: {what}", where=where)


def _wants_gpu(log: RankLog) -> bool:
    failed = log.first("failed") or {}
    inside = str(failed.get("module", "")).startswith("torch.cuda")
    init = log.first("init")
    at_start = bool(init and "nccl" in str(init["backend"]) and log.steps == 0)
    return inside or at_start


def _no_step(run: Run) -> Refused:
    none = [log for log in run.ranks if log.steps == 0]
    who = "the script" if len(none) == len(run.ranks) else f"rank {none[0].rank}"
    backwards = any(log.of("backward") for log in none)
    loads = none[0].of("load")
    if loads and not backwards:
        return _refused(
            run,
            f"{who} never took an optimizer step in {run.name}.",
            where=loads[0]["at"],
            why="it loaded a state there, which the previous run may have saved at its end.",
            fix="turn off resuming or saving during verification.",
        )
    return _refused(
        run,
        f"{who} never took an optimizer step in {run.name}.",
        why="it called backward, but stepped no torch.optim.Optimizer."
        if backwards
        else "it called no backward.",
        fix="give `paceline verify` a script that trains, with its arguments after `--`.",
    )


def _hang(run: Run) -> str:
    parts = []
    for log in run.ranks:
        span = log.open_span
        call = f"in {span.get('op', 'backward')} at {span['at']}" if span else "in no collective"
        parts.append(f"rank {log.rank} is {call}")
    return f"{run.name} made no progress: {', '.join(parts)}."


def _refused(run: Run, what: str, *, where: str = "", why: str = "", fix: str = "") -> Refused:
    tail = run.output.strip().splitlines()[-_TAIL_LINES:]
    return Refused(what, where=where, why=why, fix=fix, output=tail)
