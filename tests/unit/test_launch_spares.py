"""Interpreters that wait for a restart, and the end of the launcher's processes."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from typing import Any
from unittest.mock import Mock

import pytest

from paceline.launch.local_ranks import LocalRanks
from paceline.launch.output import Consoles


def test_spares_that_a_variable_of_the_script_spoils_are_ended_before_the_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.launch.local_ranks._KILLED_S", 0.01)
    local_ranks: Any = object.__new__(LocalRanks)
    # As a process that waits for a disk, it does not end. The restart begins all the same.
    spare = Mock(pid=1 << 30, streams=[], **{"poll.return_value": None})
    spare.process.wait.side_effect = subprocess.TimeoutExpired("python", 0.01)
    spares, started = [spare], [Mock(events=[])]
    pump = Mock()
    vars(local_ranks).update(
        ranks=[Mock(events=[{"event": "variable"}])],
        pump=pump,
        has_signal=lambda: False,
        _spares=spares,
        _changed=threading.Event(),
        _spares_fit=True,
        _script_began=0.0,
        _guard=Mock(),
        _start_all=lambda modules: started,
    )
    local_ranks.keep_spares()
    pump.finish.assert_not_called()  # it waits until the output of the spares is written
    local_ranks.start_again()
    assert local_ranks.ranks == started
    assert spare.kill.called
    local_ranks.keep_spares()
    assert local_ranks._spares == []


def test_a_guard_that_is_stopped_does_not_keep_the_launcher() -> None:
    local_ranks = LocalRanks(Consoles.of_this_process())
    os.kill(local_ranks._guard.pid, signal.SIGSTOP)
    local_ranks.close()
    assert local_ranks._guard.returncode is not None


@pytest.mark.parametrize(("returncode", "killed"), [(None, True), (0, False)])
def test_a_stopped_rank_is_killed_only_if_another_rank_runs(
    monkeypatch: pytest.MonkeyPatch, returncode: int | None, killed: bool
) -> None:
    now = 100.0
    monkeypatch.setattr("paceline.launch.local_ranks.time.monotonic", lambda: now)
    stopped = Mock(returncode=None, suspended_at=now, **{"check_suspended.return_value": True})
    other = Mock(returncode=returncode, **{"check_suspended.return_value": False})
    local_ranks: Any = object.__new__(LocalRanks)
    local_ranks.ranks = [stopped, other]
    now += 1.0
    local_ranks.kill_suspended()
    assert stopped.send_signal.called is killed
