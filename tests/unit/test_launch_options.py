"""Values that `paceline run` derives from its options and the environment."""

from __future__ import annotations

import pytest

from paceline.launch.options import read_options


@pytest.mark.parametrize(
    ("variable", "options", "expected"),
    [
        (None, [], (5, 30)),
        ("120", [], (5, 120)),  # a rank that hangs does not delay a restart for so long
        ("2", [], (2, 2)),
        ("120", ["--shutdown-timeout=60"], (60, 60)),
    ],
)
def test_how_long_ranks_may_take_to_end(
    variable: str | None,
    options: list[str],
    expected: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    if variable is not None:
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", variable)
    read = read_options([*options, "train.py"])
    assert (read.grace_s(may_save=False), read.grace_s(may_save=True)) == expected
