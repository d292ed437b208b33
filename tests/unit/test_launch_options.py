"""Values that `paceline run` derives from its options and the environment."""

from __future__ import annotations

import re

import pytest

from paceline.errors import ConfigError
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


@pytest.mark.parametrize(
    ("host", "endpoint"),
    [
        ("10.0.0.1", "10.0.0.1:29400"),
        ("node0:1234", "node0:1234"),
        ("fd00::1", "[fd00::1]:29400"),
        ("[fd00::1]", "[fd00::1]:29400"),
        ("[fd00::1]:1234", "[fd00::1]:1234"),
    ],
)
def test_the_host(host: str, endpoint: str) -> None:
    assert str(read_options(["--nnodes=2", "--host", host, "train.py"]).endpoint) == endpoint


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *(
            (
                ["--nnodes=2", "--host", host],
                f"--host is '{host}', which is not a host name or address",
            )
            for host in ("", ":29400", "http://x:1", "10.0.0.1:99999", "10.0.0.1:abc", "a b", "[a]")
        ),
        (["--nnodes=0"], "--nnodes must be 1 or more, and is 0"),
    ],
)
def test_what_is_no_host_or_number_of_nodes(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_options([*words, "train.py"])
