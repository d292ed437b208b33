"""The turns of the launcher's loop, with ranks and other nodes that the test plays."""

from __future__ import annotations

import signal
from typing import Any
from unittest.mock import Mock

import pytest

from paceline.launch.options import read_options
from paceline.launch.rendezvous import Change, RendezvousLost
from paceline.launch.signals import ReceivedSignals, SignalReceived
from paceline.launch.supervisor import Supervisor


def test_a_signal_while_another_node_joins_lets_the_ranks_save() -> None:
    received = ReceivedSignals()

    def join() -> Change:
        received._note(signal.SIGTERM, None)
        return Change("a node joins", joins=True)

    ranks: Any = Mock(done=False, any_ended_badly=False, ranks=[])
    options = read_options(["--max-restarts=3", __file__])
    supervisor = Supervisor(options, ranks, Mock(change=join), received)
    supervisor._round = Mock(exchange=None)
    with pytest.raises(SignalReceived):
        supervisor._after_turn()
    ranks.stop.assert_not_called()
    ranks.say.assert_not_called()


def test_a_node_that_finds_too_few_others_does_not_end_their_job() -> None:
    rendezvous: Any = Mock()
    rendezvous.next_round.side_effect = RendezvousLost("not enough nodes came in time")
    options = read_options([__file__])
    code = Supervisor(options, Mock(ranks=[], has_begun=False), rendezvous, ReceivedSignals()).run()
    assert code == 1
    rendezvous.close.assert_called_once_with(job_ended=False)
