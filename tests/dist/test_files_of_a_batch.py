"""The files that a step enters are those of the page about the architecture: a profile of an own loop."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import TensorDataset

import paceline
from paceline.testing import run_ranks

SOURCE = Path(paceline.__file__).parent
PAGE = (SOURCE.parents[1] / "docs" / "inside" / "architecture.md").read_text()
FILE = r"`([\w/]+\.py)(?:::[\w.]+)?`"


def _enters(job: Any, width: int, folder: str) -> list[str]:
    """The files that the main thread enters in steps 3 to 6."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            found.add(path.relative_to(SOURCE).as_posix())

    model = nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 4))
    model = paceline.ddp(job, model)
    x = torch.zeros(640, 20)
    batches = paceline.Batches(
        job, TensorDataset(x, x[:, 0].long()), global_batch=64, micro_batch=16
    )
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    training = paceline.Training(job, model, optimizer, batches)
    training.report(folder)
    for step in training.steps(until=8):
        if step.number == 3:
            sys.setprofile(note)
        for inputs, targets in step:
            step.backward(F.cross_entropy(model(inputs), targets), reduction="mean")
        step.update(clip_norm=1.0)
        training.log(loss=step.loss)
        if step.number == 6:
            sys.setprofile(None)
    return sorted(found)


def _files_of(text: str) -> set[str]:
    return set(re.findall(FILE, text))


def test_a_step_enters_the_files_of_the_page_and_no_others(tmp_path: Path) -> None:
    main = _files_of(PAGE.partition("## The way of a batch")[2].partition("\n## ")[0])
    helpers = PAGE.partition("## Helper files of a step")[2].partition("\n## ")[0]
    listed = main | set(re.findall(rf"^\| {FILE} \|", helpers, re.M))
    (written,) = re.findall(r"^\| steps after which .*", helpers, re.M)
    read_ahead = {"data/samples.py"}
    if_others_are_late = {"shm/segment.py"}  # a rank sleeps in a collective, or wakes one that does
    in_each_step = {
        32: listed
        - read_ahead
        - {"clock/waits.py", "parallel/ddp.py"},  # a model of less than 1 MiB
        20_000: listed - read_ahead - {"parallel/packed.py", "job/collectives.py"},
    }
    for width, files in in_each_step.items():
        for entered in run_ranks(_enters, width, str(tmp_path / str(width)), nproc=2):
            assert files - set(entered) <= if_others_are_late
            assert set(entered) - listed - _files_of(written) == set()
    said = re.search(r"(\d+) files with a model of up to 1 MiB, and (\d+) with a larger", helpers)
    assert said is not None
    assert said.groups() == tuple(str(len(files)) for files in in_each_step.values())
