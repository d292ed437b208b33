"""What recording may not do to the process of a rank: stop the script, or change what it computes."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from paceline.audit.events import FileWritten
from paceline.audit.models import Models
from paceline.audit.progress import Progress
from paceline.audit.record_data import _reorders
from paceline.audit.record_process import ProcessHooks
from paceline.audit.run_plan import RunPlan


@pytest.fixture(autouse=True)
def _in_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.audit.record_process.user_line", lambda: "t.py:1")


def hooks(folder: Path) -> tuple[ProcessHooks, list[Any]]:
    events: list[Any] = []
    recorder: Any = SimpleNamespace(write=events.append)
    plan = RunPlan(folder / "runs" / "ordinary", "ordinary", 2, 20)
    return ProcessHooks(Progress(plan, recorder, 0), Models(recorder)), events


class Cyclic(list[Any]):
    """A list that contains itself."""

    def __init__(self) -> None:
        super().__init__([self])


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ((torch.ones(2),), ("f",)),
        ((), ("obj", "f")),
        ((torch.ones(2), "f"), ()),
        ((Cyclic(), "f"), ()),
        ((torch.ones(2), io.BytesIO()), ()),
    ],
)
def test_whatever_torch_saves_is_saved(
    args: tuple[Any, ...], names: tuple[str, ...], tmp_path: Path
) -> None:
    hook, events = hooks(tmp_path)
    own = tuple(str(tmp_path / "a.pt") if isinstance(x, str) else x for x in args)
    named = {name: {"obj": torch.ones(2), "f": tmp_path / "a.pt"}[name] for name in names}

    def save(obj: Any, f: Any, pickle_protocol: int = 2) -> None:
        saved.append((obj, f))

    saved: list[Any] = []
    hook.save(save, *own, **named)
    assert len(saved) == 1
    writes = [event.path for event in events if isinstance(event, FileWritten)]
    is_known = not any(isinstance(x, Cyclic | io.BytesIO) for x in args)
    assert writes == [str(tmp_path / "a.pt")] * is_known


@pytest.mark.parametrize("args", [(b"a", b"b"), ("missing", "b"), ("a", None), ("folder", "other")])
def test_renames_that_cannot_be_recorded(args: tuple[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    hook, events = hooks(tmp_path)
    hook.audit("os.rename", (*args, -1, -1))
    hook.audit("open", (str(tmp_path / "folder"), "w+", 0))  # as a temporary file without a name
    assert events == []


class WithGenerator(DistributedSampler[int]):
    def __init__(self) -> None:
        super().__init__(range(100), 2, 0)  # type: ignore[arg-type]
        self.generator = torch.Generator().manual_seed(1)


class Fixed(DistributedSampler[int]):
    def __iter__(self) -> Any:
        return iter(range(self.rank, 100, 2))


def test_whether_a_sampler_has_another_order_in_the_next_epoch() -> None:
    sampler = DistributedSampler[int](range(100), 2, 0)  # type: ignore[arg-type]
    assert _reorders(sampler) is True
    assert sampler.epoch == 0
    assert _reorders(Fixed(range(100), 2, 0)) is False  # type: ignore[arg-type]
    own = WithGenerator()
    state = own.generator.get_state()
    assert _reorders(own) is None  # a copy would have the same generator
    assert torch.equal(own.generator.get_state(), state)
    assert _reorders(range(3)) is None
