"""`paceline.spawn` from a Jupyter kernel: functions of cells, output, errors, the stop button."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from launching import DEADLINE_S, wait_until

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install nbclient")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install nbclient")
pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install ipykernel")

EXAMPLE = Path(__file__).parents[2] / "examples" / "notebook.ipynb"

# ipykernel passes on what child processes print, unless it believes that pytest runs it.
NO_PYTEST = ("PYTEST_CURRENT_TEST",)


class Kernel:
    """A Jupyter kernel that runs one cell after the other."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def run(self, source: str) -> Any:
        """Run a cell; returns it, with its outputs."""
        cell = nbformat.v4.new_code_cell(source)
        self.client.nb.cells.append(cell)
        return self.client.execute_cell(cell, len(self.client.nb.cells) - 1)

    def interrupt(self) -> None:
        """What the stop button does."""
        done = self.client.km.interrupt_kernel()
        if asyncio.iscoroutine(done):
            asyncio.run(done)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    for name in NO_PYTEST:
        monkeypatch.delenv(name, raising=False)
    nb = nbformat.v4.new_notebook()
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(
        nb, timeout=DEADLINE_S, allow_errors=True, resources=resources, kernel_name="python3"
    )
    with client.setup_kernel():
        yield Kernel(client)


def _text(cell: Any, name: str = "stdout") -> str:
    return "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == name)


def _result(cell: Any) -> str:
    return next(o.data["text/plain"] for o in cell.outputs if o.output_type == "execute_result")


def _error(cell: Any) -> Any:
    return next(o for o in cell.outputs if o.output_type == "error")


FUNCTIONS = """
import time
import torch, torch.distributed as dist
import paceline

factor = 10

def work(job, number):
    print("first", "line", flush=True)
    time.sleep(0.2)
    print("no end", end="")
    return factor * job.rank + number

def fail(job):
    if job.rank == 1:
        raise ValueError("sample 17 is damaged")
    dist.all_reduce(torch.ones(1))

def hold(job):
    open(f"rank{job.rank}", "w").close()
    time.sleep(600)
"""


@pytest.mark.ci
def test_output_errors_and_the_stop_button(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(FUNCTIONS)
    cell = kernel.run("paceline.spawn(work, 5, nproc=2)")
    assert _result(cell) == "[5, 15]"
    assert _text(cell).count("first line\n") == 2
    assert _text(cell).count("no end") == 2

    error = _error(kernel.run("paceline.spawn(fail, nproc=2)"))
    assert (error.ename, error.evalue) == ("ValueError", "sample 17 is damaged")
    text = "\n".join(error.traceback)
    assert text.count("on rank 1:") == 1
    assert "on rank 0" not in text

    def stop() -> None:
        wait_until(lambda: len(list(tmp_path.glob("rank*"))) == 2)
        kernel.interrupt()

    thread = threading.Thread(target=stop)
    thread.start()
    error = _error(kernel.run("paceline.spawn(hold, nproc=2)"))
    thread.join()
    assert error.ename == "KeyboardInterrupt"
    kernel_pid = int(_result(kernel.run("import os; os.getpid()")))
    server = [
        p for p in psutil.Process(kernel_pid).children() if "forkserver" in " ".join(p.cmdline())
    ]
    assert [p.children() for p in server] == [[]]  # no rank is left
    assert _result(kernel.run("paceline.spawn(work, 6, nproc=3)")) == "[6, 16, 26]"


@pytest.mark.ci
def test_the_example_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NO_PYTEST:
        monkeypatch.delenv(name, raising=False)
    nb = nbformat.read(EXAMPLE, as_version=4)
    assert not any(cell.get("outputs") for cell in nb.cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(
        nb, timeout=DEADLINE_S, resources=resources, kernel_name="python3"
    ).execute()
    cells = [cell for cell in nb.cells if cell.cell_type == "code"]
    assert float(_result(cells[2])) > 0.8
    assert [line.split(":")[0] for line in _text(cells[2]).splitlines()] == [
        f"epoch {number}" for number in range(6)
    ]
    assert _result(cells[3]) == "True"
    assert _text(cells[4]).splitlines() == ["sample 17 is damaged", "on rank 1:"]


TRAINING = """
import torch
import paceline
from torch.utils.data import TensorDataset

with paceline.join() as job:
    model = paceline.ddp(job, torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(400, 2), torch.ones(400, 1))
    training = paceline.Training(job, model, optimizer, paceline.Batches(job, data, global_batch=4))
    training.report(progress=True)
    for step in training.steps(epochs=1):
        for x, y in step:
            step.backward(torch.nn.functional.mse_loss(model(x), y), reduction="mean")
        step.update()
        training.log(loss=step.loss)
"""


@pytest.mark.ci
def test_the_display_of_a_training_in_the_kernel_is_updated_in_place(kernel: Kernel) -> None:
    cell = kernel.run(TRAINING)
    shown = [o.data for o in cell.outputs if o.output_type == "display_data"]
    assert len(shown) == 1, cell.outputs
    text = shown[0]["text/plain"]
    assert "100/100" in text
    assert "samples/s" in text
    assert re.search(r"rank 0 [=DC.]{10,}", text)
    assert "\x1b" not in text
    assert not [o for o in cell.outputs if o.output_type == "error"]
