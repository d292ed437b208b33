"""The hook that ends a process after an error at the top of the program."""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist

from paceline.job import failures
from paceline.job.failures import ExceptHook, Peers


def test_the_hook_passes_over_an_error_that_ended_no_job(
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
    fatal, later = ValueError("fatal"), KeyError("later")
    failures.detach_excepthook(fatal)
    assert hook.peers is None
    hook(KeyError, later, None)
    assert (shown, ended) == ([later], [])
    wrapped = RuntimeError("wrapped")
    wrapped.__cause__ = fatal
    hook(RuntimeError, wrapped, None)
    assert ended == [1]
    failures.install_excepthook(second, hook)
    assert sys.excepthook is hook
    assert hook.peers is second
    failures.uninstall_excepthook()
    assert sys.excepthook is before
