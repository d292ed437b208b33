"""W&B and MLflow with servers that are away: the training goes on, says so once, and the job ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from wandb_files import read_wandb

STEPS = 60
SCRIPT = """
import sys, torch, paceline
from torch.utils.data import TensorDataset

kind, folder, address = sys.argv[1:]
if kind == "wandb":
    logger = paceline.WandB(project="p", dir=folder)
else:
    logger = paceline.MLflow("trial", tracking_uri=address)
with paceline.join(seed=7) as job:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, TensorDataset(torch.ones(60, 4)), global_batch=6)
    training = paceline.Training(job, model, optimizer, batches)
    training.report(folder, loggers=[logger])
    for step in training.steps(epochs=6):
        for (x,) in step:
            step.backward(model(x).sum(), count=len(x), reduction="sum")
        step.update()
        training.log(loss=step.loss)
"""
RUN = {
    "id": "UnVu",
    "name": "run",
    "displayName": "run",
    "config": "{}",
    "historyLineCount": 0,
    "project": {"id": "UHJv", "name": "p", "entity": {"id": "RW50", "name": "e"}},
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Away(BaseHTTPRequestHandler):
    """Answers with 503, or not at all before the test ends."""

    hangs = False
    lets_start = False
    ended: threading.Event

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode(
            errors="replace"
        )
        if self.lets_start and "/graphql" in self.path and "CreateRunFiles" not in body:
            viewer = {"id": "VXNl", "entity": "e", "username": "u", "flags": "{}"}
            bucket = {"bucket": RUN, "inserted": True}
            data = {"upsertBucket": bucket} if "upsertBucket" in body else {"viewer": viewer}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": data}).encode())
            return
        if self.hangs:
            self.ended.wait()
        self.send_response(503)
        self.end_headers()

    do_GET = do_POST = do_PUT = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Keep the output empty."""


@contextmanager
def server(how: str) -> Iterator[str]:
    """The address of a server that is away."""
    if how == "closed":
        with socket.socket() as unused:  # bound and not listening: connections are refused
            unused.bind(("127.0.0.1", 0))
            yield f"http://127.0.0.1:{unused.getsockname()[1]}"
        return
    handler = type("Handler", (Away,), {"hangs": "hangs" in how, "lets_start": "later" in how})
    handler.ended = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        served.daemon_threads = True
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{served.server_port}"
        finally:
            handler.ended.set()
            served.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *[("wandb", how) for how in ("closed", "503", "hangs", "later 503", "later hangs")],
        *[("mlflow", how) for how in ("closed", "503", "hangs")],
    ],
)
def test_a_server_that_is_away_costs_one_warning_and_no_values(
    kind: str, how: str, tmp_path: Path
) -> None:
    with server(how) as address:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, kind, str(tmp_path), address],
            env=os.environ | {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": address},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=150,  # wandb waits 20 s, Paceline 30 s; the rest is imports on a busy machine
            check=False,
        )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    warnings = [line for line in done.stderr.splitlines() if line.startswith("paceline: W&B")]
    warnings += [line for line in done.stderr.splitlines() if "metrics.jsonl has all" in line]
    if how.startswith("later"):  # wandb says itself what is not uploaded
        assert len(warnings) <= 1, done.stderr
    else:
        assert len(warnings) == 1, done.stderr
    if kind == "wandb":
        stored = read_wandb(tmp_path, "run" if how.startswith("later") else "offline-run")
        assert [row["loss"] for row in stored] == pytest.approx([line["loss"] for line in lines])
