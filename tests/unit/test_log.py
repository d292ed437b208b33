"""Messages: which ranks show them, with and without logging that the program has configured."""

from __future__ import annotations

import logging

import pytest

from paceline import log
from paceline.errors import ConfigError


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_gives_information_to_handlers_of_the_program(
    rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "paceline")
    for _ in range(2):  # a second job says it again
        handler = log.show(rank, 2)
        assert handler is None
        log.logger.info("information")
        log.once("warning")
        log.once("warning")
        log.hide(handler)
    assert caplog.messages == ["information", "warning"][rank:] * 2
    log.logger.info("after the job")
    assert "after the job" in caplog.messages


def test_an_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_LOG", "verbose")
    with pytest.raises(ConfigError, match=r"(?s)PACELINE_LOG=verbose.*use one of .*WARNING"):
        log.show(0, 1)
