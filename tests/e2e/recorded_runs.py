"""Recorded runs of scripts, which the checks of `paceline verify` judge without running a script.

`python tests/e2e/recorded_runs.py` records them anew, which takes two minutes. Do this after a change of the
events, of what a run records or of the programs.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from mutations import MUTATIONS, Mutation, apply, read_program

from paceline.audit.audit import audit
from paceline.audit.evidence import Run, read_logs
from paceline.audit.rules.rule import Case
from paceline.audit.run_plan import RunPlan
from paceline.verify import session

ARCHIVE = Path(__file__).resolve().parents[1] / "data" / "verify_runs.tar.xz"
SOUND_SCRIPTS = Path(__file__).resolve().parents[1] / "sound"
# Two passes over the data of most programs.
STEPS = 18
_RUNS = ("solo", "ordinary", "union", "null", "alone")
_TENSORS = ("result", "state", "step")

# At least one fault for each check. The number is that of the ranks.
FAULTS = {
    "class_weights_of_one_rank": 2,
    "clipped_before_unscaling": 2,
    "collective_under_rank_0": 2,
    "equal_seeds_of_ranks": 2,
    "file_of_all_ranks": 2,
    "groups_of_one_rank": 2,
    "loss_divided_by_world_size": 3,
    "no_distributed_sampler": 2,
    "no_sync_around_backward_only": 2,
    "perplexities_averaged": 2,
    "same_device": 2,
    "schedule_too_short": 2,
    "set_epoch_forgotten": 3,
    "skipped_on_one_rank": 2,
    "statistics_drift_apart": 2,
    "validation_without_the_last": 2,
}
SOUND = {
    "averaged": 2,
    "augmented": 2,
    "classifier": 3,
    "plateau": 2,
    "resumed": 2,
    "scaler": 2,
    "stream": 3,
    "tokens": 2,
    "local_sgd": 2,
    "random_negatives": 2,
}


# Whose weights and gradients are kept. They are large, and "step of one process" reads them only.
WITH_TENSORS = {"class_weights_of_one_rank", "loss_divided_by_world_size", "classifier", "averaged"}


class Recorded(NamedTuple):
    """A recorded script: its name, text and number of ranks, and its fault if it has one."""

    name: str
    text: str
    ranks: int
    mutation: Mutation | None = None


def recorded() -> list[Recorded]:
    """All recorded scripts."""
    found = [
        Recorded(each.name, apply(base, each), FAULTS[each.name], each)
        for base, changes in MUTATIONS.items()
        for each in changes
        if each.name in FAULTS
    ]
    for name, ranks in SOUND.items():
        path = SOUND_SCRIPTS / f"{name}.py"
        found.append(
            Recorded(name, path.read_text() if path.exists() else read_program(name), ranks)
        )
    return found


@contextmanager
def unpacked() -> Iterator[Path]:
    """A folder with the recorded runs."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
        yield Path(folder)


def read_case(folder: Path) -> Case:
    """The recorded runs of one script."""
    facts = json.loads((folder / "case.json").read_text())
    runs = {name: _read_run(folder / name, facts[name]) for name in _RUNS if name in facts}
    why = {name: facts[name] for name in ("why_no_union", "why_no_steps")}
    return Case(runs.pop("solo"), runs.pop("ordinary"), **runs, **why)


def _read_run(folder: Path, facts: dict[str, object]) -> Run:
    plan = RunPlan(**{**facts.pop("plan"), "folder": folder, "source": None})
    plan = replace(plan, kept=tuple(plan.kept))
    return Run(plan, read_logs(folder, plan.world_size), **facts)


def record(script: Recorded, folder: Path) -> None:
    """Run a script as `paceline verify` does, and keep in a folder what its checks read."""
    path = Path(f"{script.name}.py").resolve()
    path.write_text(script.text)
    options = session.VerifyOptions(
        [str(path)], [1, script.ranks], STEPS, False, False, None, 20.0, 120.0
    )

    def execute(plan: RunPlan) -> Run:
        return session._run(plan, options)

    solo = execute(RunPlan(folder / "solo", "solo", 1, STEPS))
    case = audit(solo, script.ranks, execute, folder).case
    facts = {"why_no_union": case.why_no_union, "why_no_steps": case.why_no_steps}
    for name in _RUNS:
        run = getattr(case, name)
        if run is not None:
            run.plan.folder.rename(folder / name)
            facts[name] = {
                "plan": asdict(run.plan),
                "returncode": run.returncode,
                "hung": run.hung,
                "out_of_time": run.out_of_time,
            }
    (folder / "case.json").write_text(json.dumps(facts, default=str))


def main() -> None:
    """Record all scripts."""
    session.preload()
    # Not TemporaryDirectory, which a rank, a fork of this process, would delete at its end.
    top = Path(tempfile.mkdtemp(prefix="paceline-recorded-"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(top)
    try:
        kept: list[Path] = []
        for script in recorded():
            folder, own = top / script.name, top / f"files-{script.name}"
            folder.mkdir()
            own.mkdir()
            os.chdir(own)
            record(script, folder)
            kept += sorted(folder.rglob("*.json*"))
            if script.name in WITH_TENSORS:
                kept += sorted(path for kind in _TENSORS for path in folder.rglob(f"{kind}-*.pt"))
            print(script.name, flush=True)
        with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
            for path in kept:
                archive.add(path, path.relative_to(top))
    finally:
        os.chdir("/")
        shutil.rmtree(top)


if __name__ == "__main__":
    main()
