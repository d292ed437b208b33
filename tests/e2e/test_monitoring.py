"""Prometheus scrapes a training, and every query of the dashboard has data."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from launching import DEADLINE_S, finish, start, wait_until
from scripts import training_script

import paceline
from paceline.errors import ConfigError
from paceline.metrics.logger import BackgroundLogger

DASHBOARD = Path(__file__).parents[2] / "docs" / "assets" / "grafana.json"
PROMETHEUS = shutil.which("prometheus")

SCRIPT = training_script(
    """
training.log(loss=step.loss)
time.sleep(0.002)
if job.rank == 0 and prometheus.port and not os.path.exists("port"):
    with open("new", "w") as file:
        file.write(f"{prometheus.address}:{prometheus.port}")
    os.rename("new", "port")
if os.path.exists("end"):
    step.stop()
""",
    before="prometheus = paceline.Prometheus(port=0)",
    report="loggers=[prometheus]",
    epochs=10**6,
)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


@pytest.mark.ci
def test_prometheus_sees_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    training = start(["run", "--nproc-per-node=2", "train.py"], tmp_path)
    server = None
    try:
        wait_until((tmp_path / "port").exists)
        target = (tmp_path / "port").read_text()
        assert target.startswith("127.0.0.1:")  # on one host nobody else can read it

        def metrics() -> str:
            text = _get(f"http://{target}/metrics")
            return text if "paceline_phase_seconds_total{" in text else ""

        text = wait_until(metrics)
        for rank in ("0", "1"):
            pattern = rf'paceline_phase_seconds_total{{phase="forward",rank="{rank}"}} \d'
            assert re.search(pattern, text)
            assert re.search(rf'paceline_memory_bytes{{rank="{rank}"}} [\d.]+e\+0\d', text)
        assert re.search(r'paceline_value{name="loss"} [\d.]+', text)
        assert "paceline_restarts 0.0" in text
        if PROMETHEUS is not None:
            server = _start_prometheus(tmp_path, target)
            _every_query_has_data(server[1])
    finally:
        if server is not None:
            server[0].terminate()
            server[0].wait(DEADLINE_S)
        (tmp_path / "end").touch()
        assert finish(training).code == 0
    if PROMETHEUS is None:
        pytest.skip("all but the dashboard was tested: the program prometheus is not installed")


def _start_prometheus(folder: Path, target: str) -> tuple[subprocess.Popen[bytes], str]:
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 300ms}\n"
        f"scrape_configs: [{{job_name: paceline, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    assert PROMETHEUS is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (folder / "prometheus.log").open("wb") as log:
        server = subprocess.Popen(
            [
                *(PROMETHEUS, "--config.file=prometheus.yml", "--storage.tsdb.path=tsdb"),
                f"--web.listen-address={address}",
            ],
            cwd=folder,
            stderr=log,
        )

    def is_ready() -> bool:
        assert server.poll() is None, (folder / "prometheus.log").read_text()
        try:
            return bool(_get(f"http://{address}/-/ready"))
        except OSError:
            return False

    wait_until(is_ready)
    return server, f"http://{address}"


def _every_query_has_data(url: str) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(queries) >= 8
    for query in queries:
        asked = urllib.parse.quote(query.replace("$__rate_interval", "30s"))

        def has_data(asked: str = asked) -> bool:
            answer = json.loads(_get(f"{url}/api/v1/query?query={asked}"))
            return answer["status"] == "success" and bool(answer["data"]["result"])

        wait_until(has_data)


def test_prometheus_shows_what_is_known() -> None:
    """NaN and infinity too; not how busy a GPU is that does not tell it."""
    pytest.importorskip("prometheus_client")
    logger = paceline.Prometheus(port=0)
    logger.log(1, {"loss": 0.5, "norm": 0.5})
    logger.log(2, {"loss": math.nan, "norm": math.inf})
    line = {"steps": 1, "samples": 8, "spent_s": {}, "memory_bytes": [1.0, 1.0]}
    logger.times(2, line | {"busy": [0.5, -1.0]})
    text = _get(f"http://{logger.address}:{logger.port}/metrics")
    logger.close()
    assert 'paceline_value{name="loss"} NaN' in text
    assert 'paceline_value{name="norm"} +Inf' in text
    assert 'paceline_busy{rank="0"} 0.5' in text
    assert 'paceline_busy{rank="1"}' not in text


def test_a_port_that_is_taken_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        logger = BackgroundLogger(paceline.Prometheus(port=taken.getsockname()[1]))
        for step in (1, 2):
            logger.log(step, {"loss": 1.0})
        logger.close()
    said = "Prometheus failed and gets no more metrics; the training goes on"
    assert caplog.text.count(said) == 1
    assert "Address already in use" in caplog.text


def test_a_port_that_is_none_is_refused() -> None:
    for port in (-1, 70000, "9400"):
        with pytest.raises(ConfigError, match="port must be a number"):
            paceline.Prometheus(port=port)  # type: ignore[arg-type]


def test_prometheus_listens_on_the_first_of_several_interfaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("prometheus_client")
    address = SimpleNamespace(family=socket.AF_INET, address="127.0.0.2")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [address]})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0,eth1")
    logger = paceline.Prometheus(port=0)
    logger.log(1, {"loss": 0.5})
    logger.close()
    assert logger.address == "127.0.0.2"
