"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from launching import unused_port
from verifying import end_server, start_server


@pytest.fixture
def free_port() -> int:
    """For the tests of options that want a number."""
    return unused_port()


@pytest.fixture(scope="session")
def verify_server() -> Iterator[None]:
    """The process that runs `paceline verify`; started before a test, which may leave no process."""
    start_server()
    yield
    end_server()
