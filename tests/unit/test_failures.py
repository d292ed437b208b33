"""The hook that ends a process after an error at the top of the program."""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist

from paceline.job import failures
from paceline.job.failures import ExceptHook, Peers


def test_the_hook_ends_the_process_also_after_its_job_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[BaseException] = []
    ended: list[int] = []
    monkeypatch.setattr("sys.excepthook", lambda kind, error, trace: shown.append(error))
    monkeypatch.setattr("os._exit", ended.append)
    first, second = (Peers(dist.HashStore(), rank, 2) for rank in range(2))
    before = sys.excepthook
    failures.install_excepthook(first, before)
    hook = sys.excepthook
    assert isinstance(hook, ExceptHook)
    failures.release_peers()
    assert hook.peers is None
    later = KeyError("later")
    hook(KeyError, later, None)
    assert (shown, ended) == ([later], [1])
    failures.install_excepthook(second, hook)
    assert sys.excepthook is hook
    assert hook.peers is second
    failures.uninstall_excepthook()
    assert sys.excepthook is before
