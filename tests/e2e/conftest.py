"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import pytest
from launching import unused_port


@pytest.fixture
def free_port() -> int:
    """For the tests of options that want a number."""
    return unused_port()
