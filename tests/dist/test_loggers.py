"""What `training.log` was given arrives in every logger, from rank 0 or from all ranks."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import logging
import math
import re
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import TensorDataset
from wandb_files import read_wandb

import paceline
from paceline.errors import ConfigError, RankDisagreement
from paceline.metrics.json_lines import JSONLines
from paceline.metrics.logger import BackgroundLogger
from paceline.metrics.report import Report
from paceline.metrics.usage import Usage, gpu_busy
from paceline.report.run import load
from paceline.testing import run_failing_ranks, run_ranks


def _training(job: Any) -> paceline.Training:
    torch.manual_seed(1)
    model = paceline.ddp(job, nn.Linear(2, 1))
    data = TensorDataset(torch.ones(12, 2), torch.ones(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return paceline.Training(job, model, optimizer, paceline.Batches(job, data, global_batch=4))


def _train(training: paceline.Training, epochs: int = 2) -> Any:
    for step in training.steps(epochs=epochs):
        for x, y in step:
            step.backward(nn.functional.mse_loss(training.models[0](x), y), reduction="mean")
        step.update()
        yield step


def _log(job: Any, folder: str) -> list[float]:
    training = _training(job)
    loggers: list[Any] = [
        paceline.CSV(f"{folder}/csv/table.csv"),
        paceline.WandB(mode="offline", project="test", dir=folder, settings={"silent": True}),
        paceline.MLflow(
            "trial", tracking_uri=f"file:{folder}/mlruns", run_name="one", parameters={"lr": 0.1}
        ),
    ]
    loggers.append(paceline.TensorBoard(f"{folder}/tensorboard"))
    training.report(folder, loggers=loggers)
    losses = []
    for step in _train(training):
        training.log(loss=step.loss, own=job.rank + 10 * step.number)
        training.log(reduce="mean", mean=torch.tensor(float(job.rank)))
        training.log(reduce="sum", total=job.rank + step.number)
        if step.number % 3 == 0:
            training.log(rare=step.number)
        losses.append(float(step.loss))
    return losses


def _read_all(folder: Path) -> dict[str, list[dict[str, float]]]:
    """The values of each step, as every logger wrote them to its own files."""
    found: dict[str, list[dict[str, float]]] = {}
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found["metrics.jsonl"] = [json.loads(line) for line in lines]
    with (folder / "csv/table.csv").open() as file:
        rows = list(csv.DictReader(file))
    found["csv"] = [{k: float(v) for k, v in row.items() if v} for row in rows]
    found["tensorboard"] = _read_tensorboard(folder)
    found["wandb"] = read_wandb(folder)
    found["mlflow"] = _read_mlflow(folder)
    return found


def _read_tensorboard(folder: Path) -> list[dict[str, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    steps: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            steps.setdefault(event.step, {"step": event.step})[name] = event.value
    return [steps[step] for step in sorted(steps)]


def _read_mlflow(folder: Path) -> list[dict[str, float]]:
    import mlflow

    client = mlflow.MlflowClient(f"file:{folder}/mlruns")
    experiment = client.get_experiment_by_name("trial")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params == {"lr": "0.1"}
    steps: dict[int, dict[str, float]] = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            steps.setdefault(metric.step, {"step": metric.step})[name] = metric.value
    return [steps[step] for step in sorted(steps)]


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.ci
def test_values_can_be_read_back_from_every_logger(
    tmp_path: Path, nproc: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    losses = run_ranks(_log, str(tmp_path), nproc=nproc)[0]
    for name, rows in _read_all(tmp_path).items():
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6], name
        for step, row in enumerate(rows, start=1):
            assert row["loss"] == pytest.approx(losses[step - 1], rel=1e-6), name
            assert row["own"] == 10 * step, name
            assert row["mean"] == (nproc - 1) / 2, name
            assert row["total"] == nproc * step + nproc * (nproc - 1) / 2, name
            assert row.get("rare") == (step if step % 3 == 0 else None), name


class Kept:
    """A logger that keeps the values of each step, and then calls `act(step)`; 0 when it is closed."""

    def __init__(self, act: Callable[[int], object] = lambda step: None) -> None:
        self.values: dict[int, Any] = {}
        self._act = act

    def log(self, step: int, values: Any) -> None:
        self.values[step] = values
        self._act(step)

    def close(self) -> None:
        self.log(0, {})


def test_a_logger_that_fails_stops_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def away(step: int) -> None:
        if step != 1:
            raise ConnectionError("no route to the server")

    failing = Kept(away)
    with caplog.at_level(logging.WARNING, "paceline"), paceline.join() as job:
        training = _training(job)
        training.report(str(tmp_path), loggers=[failing])
        assert len([training.log(loss=step.loss) for step in _train(training)]) == 6
    assert list(failing.values) == [1, 2, 0]
    said = [record.getMessage() for record in caplog.records if "Kept" in record.getMessage()]
    assert len(said) == 1
    assert "the training goes on" in said[0]
    assert "ConnectionError: no route to the server" in said[0]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 6


def test_a_slow_logger_delays_no_step_and_the_end_only_for_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.metrics.logger._CLOSE_S", 0.05)
    release = threading.Event()
    with caplog.at_level(logging.WARNING, "paceline"), paceline.join() as job:
        training = _training(job)
        training.report(loggers=[Kept(lambda step: release.wait())])
        assert len([training.log(loss=step.loss) for step in _train(training)]) == 6
    release.set()
    assert "Kept did not take the last metrics" in caplog.text


def test_a_logger_that_hangs_keeps_a_bounded_number_of_values(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.metrics.logger._MOST_WAITING", 3)
    hangs, release = threading.Event(), threading.Event()
    kept = Kept(lambda step: (hangs.set(), release.wait()))
    logger = BackgroundLogger(kept)
    logger.log(1, {})
    assert hangs.wait(10)
    for step in range(2, 20):
        logger.log(step, {})
    release.set()
    logger.close()
    assert list(kept.values) == [1, 2, 3, 4, 0]  # 0: it is closed
    assert caplog.text.count("Kept is too slow: 3 values wait for it") == 1
    assert "from step 5 on" in caplog.text


def test_a_resumed_table_has_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    for first in (1, 3):
        table = paceline.CSV(path)
        for step in range(first, first + 4):
            table.log(step, {"loss": step / first} | ({"late": 1.0} if step > 5 else {}))
        table.close()
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["loss"], row["late"]) for row in rows] == [
        ("1", "1.0", ""),
        ("2", "2.0", ""),
        ("3", "1.0", ""),
        ("4", str(4 / 3), ""),
        ("5", str(5 / 3), ""),
        ("6", "2.0", "1.0"),
    ]


@pytest.mark.parametrize("text", ["name,value\n", "name,value\na,1\n"])
def test_a_table_of_another_program_is_not_overwritten(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match="has no column `step`"):
        paceline.CSV(path).log(1, {"loss": 1.0})
    assert path.read_text() == text


def test_rows_that_were_cut_are_left_out_of_a_resumed_table(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("step,epoch,loss\n1,0,0.5\n2\n,0,0.7\n3,0,0.25\n4,0,0.1")
    paceline.CSV(path).log(5, {"epoch": 0, "loss": 1.0})
    assert path.read_text().split() == ["step,epoch,loss", "1,0,0.5", "3,0,0.25", "5,0,1.0"]


def test_nan_and_infinity_reach_every_logger(tmp_path: Path) -> None:
    kept = Kept()
    with paceline.join() as job:
        training = _training(job)
        loggers = [kept, paceline.TensorBoard(tmp_path / "tensorboard")]
        training.report(str(tmp_path), loggers=loggers)
        for step in _train(training, epochs=1):
            training.log(bad=math.nan, norm=-math.inf, number=step.number)
    assert math.isnan(kept.values[3]["bad"])
    assert kept.values[3]["norm"] == -math.inf
    assert math.isnan(_read_tensorboard(tmp_path)[-1]["bad"])
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["bad"], last["norm"], last["number"]) == ("nan", "-inf", 3)


def test_the_run_of_a_failed_job_is_marked_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    codes: list[int] = []

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            pass

        def finish(self, exit_code: int) -> None:
            codes.append(exit_code)

    wandb = paceline.WandB()
    wandb._run = Run()
    uri = f"file:{tmp_path}/mlruns"

    def fail() -> None:
        with paceline.join() as job:
            training = _training(job)
            training.report(loggers=[wandb, paceline.MLflow("trial", tracking_uri=uri)])
            for step in _train(training):
                training.log(number=step.number)
                if step.number == 3:
                    raise LookupError

    with pytest.raises(LookupError):
        fail()
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("trial")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED"
    assert codes == [1]


def test_files_stay_where_they_are_if_the_program_changes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    for name, make in (("a.csv", paceline.CSV), ("a.jsonl", JSONLines)):
        logger = make(name)
        monkeypatch.chdir(tmp_path / "elsewhere")
        logger.log(1, {"value": 1})
        logger.close()
        monkeypatch.chdir(tmp_path)
        assert (tmp_path / name).exists()


def test_a_gpu_that_tells_nothing_stops_no_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(device: Any) -> int:
        raise RuntimeError("Not Supported")

    monkeypatch.setattr(torch.cuda, "utilization", refuse)
    with caplog.at_level(logging.WARNING, "paceline"):
        assert gpu_busy(torch.device("cuda")) == -1
    assert "no GPU utilization: RuntimeError: Not Supported" in caplog.text
    memory_bytes, busy = Usage(torch.device("xpu")).measure()
    assert memory_bytes > 0
    assert busy == -1


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_display_has_the_step_the_rate_and_the_values(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=is_terminal, width=200)
    monkeypatch.setattr("paceline.metrics.progress.Console", lambda stderr: console)
    with paceline.join() as job:
        training = _training(job)
        training.report(progress=True)
        for _ in _train(training):
            time.sleep(0.05)  # the first window ends after 0.1 s
            training.log(**{"loss[bold]": 0.5, "[/x]": math.nan})
    last = shown.getvalue().partition("step 6/6")[2]
    assert re.search(r"epoch 1  \d+ samples/s  loss\[bold\] 0\.5  \[/x\] nan", last)
    assert ("rank 0 " in last) == is_terminal


def _steps_in(folder: Path) -> list[int]:
    return [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def test_a_loop_that_is_left_and_another_one_write_to_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr("paceline.metrics.progress.Console", lambda stderr: terminal)
    with paceline.join() as job:
        training = _training(job)
        training.report(str(tmp_path), progress=True)
        for step in _train(training):
            training.log(loss=step.loss)
            if step.number == 3:
                break
        for step in _train(training):
            training.log(loss=step.loss)
    # Of the first loop, the values that were not exchanged yet are lost.
    assert _steps_in(tmp_path)[-3:] == [4, 5, 6]


def test_a_new_run_keeps_the_files_of_an_earlier_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = tmp_path / "table.csv"
    for number in range(3):
        with caplog.at_level(logging.INFO, "paceline"), paceline.join() as job:
            training = _training(job)
            training.report(str(tmp_path), loggers=[paceline.CSV(table)])
            for _ in _train(training):
                training.log(run=number)
    for suffix, number in (("-1", 0), ("-2", 1), ("", 2)):
        text = (tmp_path / f"metrics{suffix}.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        assert [(line["step"], line["run"]) for line in lines] == [(n, number) for n in range(1, 7)]
        first = (tmp_path / f"clock{suffix}.jsonl").read_text().splitlines()[0]
        assert json.loads(first)["run"]["loop"] == 0
        with (tmp_path / f"table{suffix}.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [(row["step"], row["run"]) for row in rows] == [
            (str(n), str(number)) for n in range(1, 7)
        ]
    said = "metrics.jsonl and clock.jsonl of an earlier run are kept as metrics-{n}.jsonl and clock-{n}."
    for n in (1, 2):
        assert caplog.text.count(said.format(n=n)) == 1
        assert caplog.text.count(f"table.csv of an earlier run is kept as table-{n}.csv.") == 1


def test_a_resumed_run_continues_the_files(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for number, epochs in enumerate((2, 4)):
        with paceline.join() as job:
            torch.manual_seed(1)
            model = paceline.ddp(job, nn.Linear(2, 1))
            training = paceline.Training(
                job,
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                paceline.Batches(
                    job, TensorDataset(torch.ones(12, 2), torch.ones(12, 1)), global_batch=4
                ),
                checkpoints=paceline.Checkpoints(str(folder)),
            )
            training.report(str(tmp_path))
            for _ in _train(training, epochs):
                training.log(run=number)
        if not number:  # an interrupted run has written steps after its last checkpoint
            with (tmp_path / "metrics.jsonl").open("a") as file:
                file.write('{"step": 7, "epoch": 2, "time_s": 9.0, "run": 0}\n{"step": 8, "epo')
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["run"] for line in lines] == [0] * 6 + [1] * 6
    assert [run["step"] for run in load(str(tmp_path)).record.runs] == [0, 6]
    assert not list(tmp_path.glob("*-1.jsonl"))


def test_a_disk_that_is_full_for_a_while_stops_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.WARNING, "paceline"), paceline.join() as job:
        training = _training(job)
        training.report(str(tmp_path))
        try:
            for step in _train(training, epochs=3):
                # The values of step n are written when step n + 1 begins. A line takes 40 bytes or more.
                soft = 100 if step.number in (4, 5, 6) else limits[0]
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, limits[1]))
                training.log(value=step.number)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    steps = _steps_in(tmp_path)
    assert steps[:2] == [1, 2]
    assert steps[-2:] == [8, 9]
    assert 4 not in steps
    assert caplog.text.count("metrics.jsonl cannot be written") == 1


def test_lines_that_cannot_be_written_leave_nothing_in_the_file(tmp_path: Path) -> None:
    lines = JSONLines(tmp_path / "lines.jsonl")
    lines.log(1, {"value": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40, limits[1]))  # a part of the second line
        for step in (2, 3):
            with pytest.raises(OSError, match="File too large"):
                lines.log(step, {"value": step})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    lines.log(4, {"value": 4})
    lines.close()
    assert lines.path.read_text() == '{"step": 1, "value": 1}\n{"step": 4, "value": 4}\n'


def test_tensorboard_shows_no_steps_that_a_resumed_run_has_removed(tmp_path: Path) -> None:
    for steps in (
        (1, 2, 3, 4),
        (2, 3),
    ):  # the first run has written steps after its last checkpoint
        logger = paceline.TensorBoard(tmp_path / "tensorboard")
        for step in steps:
            logger.log(step, {"value": 10 * steps[0] + step})
        logger.close()
    values = [(row["step"], row["value"]) for row in _read_tensorboard(tmp_path)]
    assert values == [(1, 11), (2, 22), (3, 23)]


def test_the_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "clock.jsonl").mkdir()
    with paceline.join() as job:
        report = Report(job)
        report.open(str(tmp_path), progress=False, loggers=[])
        with pytest.raises(ConfigError, match=r"clock\.jsonl") as refused:
            report.begin(5, None, dict)
        report.close()
    assert "metrics.jsonl" not in str(refused.value)


def test_a_damaged_file_of_metrics_stops_no_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1, "time_s": 2.5}\n\0\0\0\0\n[1]\n{"step": 2}\n{"step": 9, "time_s": 3}\n{"step": 3'
    )
    assert JSONLines(path).rewind(1) == 2.5
    assert path.read_bytes() == b'{"step": 1, "time_s": 2.5}\n'
    path.write_bytes(b'{"step": 1}\n\xff\xfe\n')
    assert JSONLines(path).rewind(5) == 0
    assert path.read_bytes() == b'{"step": 1}\n'


def test_a_further_loop_reads_the_file_only_to_go_back(tmp_path: Path) -> None:
    lines = JSONLines(tmp_path / "lines.jsonl")
    lines.rewind(0)
    file = lines.path.stat().st_ino  # removing lines makes a new file
    for step in (1, 2, 3):
        lines.log(step, {"time_s": step / 4})
    assert lines.rewind(3) == 0.75
    assert lines.path.stat().st_ino == file
    assert lines.rewind(2) == 0.5
    lines.log(3, {"time_s": 9.0})
    lines.close()
    steps = [json.loads(line) for line in lines.path.read_text().splitlines()]
    assert [(line["step"], line["time_s"]) for line in steps] == [(1, 0.25), (2, 0.5), (3, 9.0)]


def _differ(job: Any, kind: str) -> None:
    training = _training(job)
    for step in _train(training, epochs=9):
        if job.rank == 1 and kind == "missing":
            continue
        training.log(reduce="mean", **{f"value_{job.rank if kind == 'names' else 0}": step.number})


@pytest.mark.parametrize("kind", ["missing", "names"])
def test_ranks_that_log_different_names_get_an_error(kind: str) -> None:
    for outcome in run_failing_ranks(_differ, kind, nproc=3):
        assert isinstance(outcome.error, RankDisagreement)
        assert "call training.log(..., reduce=...) on all ranks" in str(outcome.error)


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_named_with_its_cure(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    makers: dict[str, Any] = {
        "tensorboard": lambda: paceline.TensorBoard("folder"),
        "wandb": lambda: paceline.WandB(),
        "mlflow": lambda: paceline.MLflow(),
    }
    with pytest.raises(ConfigError, match=rf"pip install 'paceline\[{package}\]'"):
        makers[package]()


def test_wrong_use_is_refused() -> None:
    with paceline.join() as job:
        training = _training(job)
        for logger in (print, paceline.TensorBoard):
            with pytest.raises(ConfigError, match="is not a logger"):
                training.report(loggers=[logger])  # type: ignore[list-item]
        for step in _train(training, epochs=1):
            with pytest.raises(ConfigError, match="reduce must be"):
                training.log(reduce="max", value=1)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="is the loss over all ranks"):
                training.log(reduce="sum", loss=step.loss)
            for value in (
                np.ones(2),
                torch.ones(2),
                [1.0],
                "3",
                None,
                torch.tensor(1j),
                np.array(["a"]),
            ):
                with pytest.raises(ConfigError, match="'value' must be one number"):
                    training.log(value=value)
            for name in ("step", "epoch", "time_s"):
                with pytest.raises(ConfigError, match=f"Paceline writes '{name}' itself"):
                    training.log(**{name: 1})
            training.log(array=np.ones((1, 1)), integer=np.int64(3), shape=torch.ones(1))
            for method in (training.state_dict, lambda: training.load_state_dict({})):
                with pytest.raises(paceline.StepError, match="inside the loop"):
                    method()
        training.state_dict()
