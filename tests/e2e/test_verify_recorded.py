"""The checks of `paceline verify` judge recorded runs: they find each fault, and none in a sound script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from recorded_runs import FAULTS, Recorded, read_case, recorded, unpacked

from paceline.audit.audit import AuditResult, judge
from paceline.audit.rules import RULES


@pytest.fixture(scope="module")
def runs() -> Iterator[Path]:
    with unpacked() as folder:
        yield folder


@pytest.mark.parametrize("script", recorded(), ids=lambda script: script.name)
def test_the_verdict_is_that_of_the_script(script: Recorded, runs: Path) -> None:
    case = read_case(runs / script.name)
    result = AuditResult(case, judge(case))
    wanted = script.mutation
    if wanted is None:
        assert result.faults == {}
        return
    assert list(result.faults) == ([] if wanted.is_note else [wanted.check]), result.judgements
    finding = (result.faults | result.notes)[wanted.check]
    number = int(finding.at.partition(":")[2].split()[0])
    assert wanted.line in script.text.splitlines()[number - 1]


def test_each_check_has_a_recorded_fault() -> None:
    found = {each.mutation for each in recorded() if each.mutation}
    assert {each.name for each in found} == FAULTS.keys()
    assert {each.check for each in found} == {rule.name for rule in RULES}
