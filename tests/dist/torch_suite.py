"""torch's own tests for backends, on this one: `BACKEND=shm WORLD_SIZE=2 python torch_suite.py`."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
import types
import unittest

if importlib.util.find_spec("expecttest") is None:  # torch's tests import it; these do not use it
    sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)  # type: ignore[assignment]
backend = os.environ.get("BACKEND", "shm")
os.environ["BACKEND"] = "gloo"  # decorators skip many tests for other names
os.environ.setdefault("WORLD_SIZE", "2")
os.environ.setdefault("TEMP_DIR", "/tmp")

from torch.testing._internal.distributed import distributed_test  # noqa: E402 # reads what is set

from paceline.shm.group import register  # noqa: E402 # after the above


class _Name(str):
    """Creates groups of its own name, and equals "gloo" if a test asks which backend it runs on."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)


register()
distributed_test.BACKEND = _Name(backend)


class TorchSuite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """Runs each test in forked processes, because importing torch takes longer than most tests."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(multiprocessing.get_context("fork").Process)

    if backend != "gloo":
        _refused = unittest.skip(
            "monitored_barrier of torch.distributed refuses all names but gloo"
        )
        test_monitored_barrier_gloo = _refused(lambda self: None)
        test_monitored_barrier_gloo_subgroup = _refused(lambda self: None)


if __name__ == "__main__":
    unittest.main(verbosity=2)
