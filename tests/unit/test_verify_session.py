"""How long a run of `paceline verify` may take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.audit.audit import AuditResult
from paceline.audit.evidence import RankLog, Run
from paceline.audit.refusals import Refused
from paceline.audit.rules.rule import Case, Finding, Judgement
from paceline.audit.run_plan import RunPlan
from paceline.errors import ConfigError
from paceline.verify import session
from paceline.verify.session import VerifyOptions, _timeout_s

OPTIONS = VerifyOptions(
    script=["train.py"],
    counts=[1, 2],
    steps=None,
    strict=False,
    bitwise=False,
    rtol=None,
    hang_after_s=20,
    timeout_s=600,
)
ORDINARY = RunPlan(Path("ordinary"), "ordinary", 2, 20)
UNION = RunPlan(Path("union"), "union", 1, 20, source=Path("ordinary"), ranks=2)


@pytest.mark.parametrize(
    ("plan", "longest_s", "limit_s"),
    [(ORDINARY, 1.0, 600), (UNION, 1.0, 30), (UNION, 9.0, 90), (UNION, 100.0, 600)],
)
def test_a_union_run_may_take_ten_times_as_long_as_the_runs_before(
    plan: RunPlan, longest_s: float, limit_s: float
) -> None:
    assert _timeout_s(plan, OPTIONS, longest_s) == limit_s


def test_no_union_run_takes_longer_than_the_user_allows() -> None:
    assert _timeout_s(UNION, replace(OPTIONS, timeout_s=10), 5.0) == 10


def test_a_refusal_at_a_number_of_processes_keeps_the_faults_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solo = Run(UNION, [RankLog(0, [], [])], 0)
    monkeypatch.setattr(session, "preload", lambda: None)
    monkeypatch.setattr(session, "refuse", lambda run: None)
    monkeypatch.setattr(session, "_run", lambda plan, options: solo)
    fault = Finding(what="w", at="t.py:1", why="y", fix="f", evidence="e", effect="x")
    judgements: dict[str, Judgement] = {}

    def audit(run: Run, count: int, *_: object, strict: bool) -> AuditResult:
        if count == 3:
            raise Refused("at most 2 processes")
        return AuditResult(Case(run, replace(run, plan=ORDINARY)), judgements)

    monkeypatch.setattr(session, "audit", audit)
    options = replace(OPTIONS, counts=[1, 2, 3])
    with pytest.raises(Refused):
        session.verify(options, lambda text: None)
    judgements["a rule"] = fault
    result = session.verify(options, lambda text: None)
    assert result.exit_code == 1
    assert result.lines[-2:] == [
        "remark: with 3 processes it could not be verified: at most 2 processes",
        "1 fault, 0 notes, 0 checks passed, 0 not seen",
    ]


def test_a_full_disk_of_verification_is_no_fault_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: Any = SimpleNamespace(wait=lambda timeout_s: True, end=lambda: None, pids=[])
    monkeypatch.setattr(session, "ForkedRanks", lambda *_: ended)
    monkeypatch.setattr(session.shutil, "disk_usage", lambda folder: SimpleNamespace(free=4096))
    plan = RunPlan(tmp_path / "solo", "solo", 1, 20)
    with pytest.raises(Refused, match="the disk of verification's own folder is full"):
        session._run(plan, OPTIONS)


def test_what_the_runs_recorded_is_kept_in_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(plan: RunPlan, options: VerifyOptions) -> Run:
        plan.folder.mkdir()
        (plan.folder / "rank0.jsonl").touch()
        raise Refused("nothing to judge")

    monkeypatch.setattr(session, "preload", lambda: None)
    monkeypatch.setattr(session, "_run", write)
    options = replace(OPTIONS, keep=tmp_path / "kept")
    with pytest.raises(Refused, match="nothing to judge"):
        session.verify(options, lambda line: None)
    assert [path.name for path in (tmp_path / "kept/solo").iterdir()] == ["rank0.jsonl"]
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="other users can write"):
        session.verify(replace(OPTIONS, keep=tmp_path / "open"), lambda line: None)
    with pytest.raises(ConfigError, match="is not empty"):
        session.verify(options, lambda line: None)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot make the folder"):
        session.verify(replace(OPTIONS, keep=tmp_path / "file"), lambda line: None)
