"""Torch's own suite for backends, run with this one: `BACKEND=shm WORLD_SIZE=2 python torch_suite.py`."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
import unittest

if importlib.util.find_spec("expecttest") is None:  # torch's tests import it; these do not use it
    sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)  # type: ignore[assignment]
os.environ.setdefault("BACKEND", "shm")
os.environ.setdefault("WORLD_SIZE", "2")
os.environ.setdefault("TEMP_DIR", "/tmp")

from torch.testing._internal.common_distributed import DistTestCases  # noqa: E402 # after the above

from paceline.shm.group import register  # noqa: E402 # after the above

register()
for feature in ("ddp", "subgroup", "plugin"):
    DistTestCases.backend_feature[feature].add("shm")

from torch.testing._internal.distributed import distributed_test  # noqa: E402 # reads what is set


class TorchSuite(
    distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase
):
    """Each test of torch's in new processes."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


if __name__ == "__main__":
    unittest.main(verbosity=2)
