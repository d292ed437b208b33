"""A signal that arrives while the launcher imports torch."""

from __future__ import annotations

import signal
from typing import Any, cast

import pytest

from paceline import launch


def test_a_signal_that_the_import_swallows_still_ends_the_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "_received", [])
    with pytest.raises(SystemExit):
        launch._exit(signal.SIGTERM, None)  # as in a callback, where Python only prints it
    with pytest.raises(SystemExit) as ended:
        launch._launch(["train.py"], cast(Any, None))
    assert ended.value.code == 128 + signal.SIGTERM
