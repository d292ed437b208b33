"""Signals that the launcher receives."""

from __future__ import annotations

import signal
import time

import pytest

from paceline.job.preemption import SAME_SIGNAL_S
from paceline.launch.signals import ReceivedSignals, SignalReceived


def test_two_signals_at_once_are_one_and_a_later_one_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    signals = ReceivedSignals()
    assert not signals.skip_grace
    for passed_s in (0, SAME_SIGNAL_S):
        now = 100.0 + passed_s
        signals._note(signal.SIGHUP, None)
        assert not signals.skip_grace
    now += 0.1
    signals._note(signal.SIGHUP, None)
    assert signals.skip_grace


def test_a_signal_for_ranks_ends_the_launcher_while_no_script_runs() -> None:
    signals = ReceivedSignals()
    with pytest.raises(SignalReceived), signals.interruptible():
        signals._note_for_ranks(signal.SIGUSR1, None)
