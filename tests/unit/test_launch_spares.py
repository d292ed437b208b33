"""Interpreters that wait for a restart."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from paceline.launch.local_ranks import LocalRanks


def test_spares_that_a_variable_of_the_script_spoils_are_ended_before_the_restart() -> None:
    local_ranks: Any = object.__new__(LocalRanks)
    spare = Mock(pid=1 << 30, streams=[], **{"poll.return_value": None})
    spares, started = [spare], [Mock(events=[])]
    pump = Mock()
    vars(local_ranks).update(
        ranks=[Mock(events=[{"event": "variable"}])],
        pump=pump,
        has_signal=lambda: False,
        _spares=spares,
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
