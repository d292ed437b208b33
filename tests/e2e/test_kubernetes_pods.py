"""What a pod of `paceline job k8s` sees, without a cluster.

Each pod has its own network, host name, process and mount namespace. It runs the command of the file that
`paceline job k8s` writes, as process 1, with the variables of an Indexed Job and without capabilities. The
test takes the place of the kubelet (SIGTERM), of the name server (/etc/hosts), and of the Job controller,
which reads podFailurePolicy and makes the next pod, with another address.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from hosts import Hosts, missing_tool
from launching import finish, wait_until
from scripts import training_script

from paceline.cli import main

_REASON = missing_tool("setpriv", "mount")
pytestmark = pytest.mark.skipif(bool(_REASON), reason=_REASON or "-")

TRAIN = training_script(
    'open(f"steps{job.rank}", "a").write(f"{step.number} {os.uname().nodename}\\n")\n'
    "time.sleep(float(sys.argv[1]))",
    epochs=4,
    checkpoints='"runs/a", keep=2, every_steps=4',
)
# Of the shell that takes the place of the container runtime.
RUNTIME = 'hostname "$1"; mount -t tmpfs -o "size=$2" shm /dev/shm; shift 2; exec "$@"'
NO_CAPABILITIES = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]


class Pods:
    """The pods of one Job of two indexes; each new pod has an address that no pod had before."""

    def __init__(self, folder: Path, made: Hosts) -> None:
        line = "job k8s train.py --image me/train:1 --nodes 2 --grace 20s --output"
        words = [*line.split(), str(folder / "deploy"), "--", "0.1"]
        assert main.main(words) == 0
        text = (folder / "deploy" / "train.k8s.yaml").read_text()
        (job,) = (d for d in yaml.safe_load_all(text) if d["kind"] == "Job")
        self._folder = folder
        self._made = made
        self._spec = job["spec"]
        self._pod = self._spec["template"]["spec"]
        self._next = 0
        self._names: dict[str, str] = {}

    @property
    def grace_s(self) -> int:
        """Of the kubelet."""
        return int(self._pod["terminationGracePeriodSeconds"])

    def start(self, index: int) -> subprocess.Popen[str]:
        """A new pod of this index, whose name then leads to its address."""
        number, self._next = self._next, self._next + 1
        host = f"train-{index}"
        self._names[f"{host}.{self._pod['subdomain']}"] = self._made.address(number)
        self._write_names(number, host)
        (container,) = self._pod["containers"]
        variables = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": host}
        variables |= {item["name"]: item["value"] for item in container["env"]}
        command = [
            re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word)
            for word in container["command"]
        ]
        assert command[0] == "paceline"
        size = self._pod["volumes"][0]["emptyDir"]["sizeLimit"].replace("Mi", "m")
        return self._made.spawn(
            number,
            [
                *("unshare", "--uts", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child"),
                *("sh", "-c", RUNTIME, "sh", host, size, *NO_CAPABILITIES),
                *(sys.executable, "-m", *command),
            ],
            self._folder,
            **variables,
        )

    def _write_names(self, number: int, host: str) -> None:
        for other in range(number + 1):
            lines = ["127.0.0.1 localhost", *(f"{a} {name}" for name, a in self._names.items())]
            if other == number:
                lines.append(f"{self._made.address(number)} {host}")
            # The file is mounted in the pod, so it is changed in place.
            (self._made._folder(other) / "hosts").write_text("\n".join(lines) + "\n")

    def action(self, code: int) -> str:
        """What the Job controller does with a pod that ended with this code."""
        for rule in self._spec["podFailurePolicy"]["rules"]:
            if code in rule.get("onExitCodes", {}).get("values", []):
                return str(rule["action"])
        return "Count"


def first_process(pod: subprocess.Popen[str]) -> psutil.Process:
    """Process 1 of a pod, to which the kubelet sends its signals."""
    (child,) = psutil.Process(pod.pid).children()
    return child


def steps(folder: Path, rank: int = 0) -> list[list[str]]:
    """The steps that a rank has done, and the host name of its pod."""
    file = folder / f"steps{rank}"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def wait_steps(folder: Path, count: int, *pods: subprocess.Popen[str]) -> None:
    wait_until(lambda: len(steps(folder)) >= count, *pods)


def terminate(pods: Pods, gone: Any, *others: Any) -> None:
    """The kubelet ends one pod; all end with 75 in time."""
    began = time.monotonic()
    first_process(gone).send_signal(signal.SIGTERM)
    ends = [finish(pod) for pod in (gone, *others)]
    assert [end.code for end in ends] == [75] * len(ends), ends
    assert time.monotonic() - began < pods.grace_s
    assert {pods.action(end.code) for end in ends} == {"Ignore"}


@pytest.fixture
def pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    made = Hosts(4)
    try:
        yield Pods(tmp_path, made)
    finally:
        made.close()


@pytest.mark.slow
def test_a_preempted_job_goes_on_in_new_pods(tmp_path: Path, pods: Pods) -> None:
    second = pods.start(1)  # before the name of the first leads to an address
    assert second.stderr is not None
    assert "waiting for 2 nodes at train-0.train:29400" in second.stderr.readline()
    first = pods.start(0)
    wait_steps(tmp_path, 6, first, second)
    assert {name for _, name in steps(tmp_path)} == {"train-0"}, "the index is the node rank"
    terminate(pods, second, first)
    stopped = int(steps(tmp_path)[-1][0])
    assert stopped < 32

    ends = [finish(pod) for pod in [pods.start(0), pods.start(1)]]
    assert [end.code for end in ends] == [0, 0], ends
    assert f"resumed after step {stopped} " in ends[0].err
    assert [int(number) for number, _ in steps(tmp_path)] == list(range(1, 33))


@pytest.mark.slow
def test_a_wrong_script_is_a_failure_that_counts_or_ends_the_job(
    tmp_path: Path, pods: Pods
) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('bad')")
    ends = [finish(pod) for pod in (pods.start(0), pods.start(1))]
    assert [end.code for end in ends] == [1, 1], ends
    assert pods.action(1) == "Count"
    (tmp_path / "train.py").unlink()
    ends = [finish(pod) for pod in (pods.start(0), pods.start(1))]
    assert [end.code for end in ends] == [2, 2], ends
    assert pods.action(2) == "FailJob"


@pytest.mark.ci
def test_a_pod_that_is_ended_while_it_starts_does_not_wait(tmp_path: Path, pods: Pods) -> None:
    pod = pods.start(0)
    process = psutil.Process(pod.pid)
    # From then on it handles the signal; it imports torch after that, and waits for the other pod.
    wait_until(lambda: any(_catches_sigterm(each.pid) for each in process.children()))
    began = time.monotonic()
    first_process(pod).send_signal(signal.SIGTERM)
    assert finish(pod).code == 143
    assert time.monotonic() - began < 10  # without its own handler, process 1 ignores SIGTERM


def _catches_sigterm(pid: int) -> bool:
    found = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None
    return bool(int(found[1], 16) >> (signal.SIGTERM - 1) & 1)
