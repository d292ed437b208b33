"""`paceline job docker`: the files of this repository, hadolint, the schema of Compose, and wrong input."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import paceline
from paceline.cli import job, main
from paceline.exit_codes import ExitCode
from paceline.launch.options import read_options

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "tests" / "data" / "jobs" / "compose.json"
OURS = "examples/digits.py --nodes 2 --install .[examples] --output containers"
LINES = {
    "one": "train.py",
    "gpus": "train.py --nodes 2 --gpus 2 --cpus 4 --memory 8G --grace 5m --shm-size 1G",
    "module": "-m pack.train --install . --output deploy/docker --name my_job --run-folder /runs",
    "odd": 'train.py --env A=$B --secret WANDB_API_KEY --image a.b:5000/c:1 -- --tag "$x" é',
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("train.py", "requirements.txt", "constraints.txt"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _files(line: str) -> Mapping[str, str]:
    """The files that a command would write."""
    own, _, script = f"docker {line}".partition(" -- ")
    args = job._parse(own.split())
    return job._scheduler("docker").write(job._request(args, script.split()), args).files


def _hadolint(text: str) -> str:
    beside = shutil.which("hadolint", path=Path(sys.executable).parent)
    path = beside or shutil.which("hadolint")
    if path is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([path, "-"], input=text, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_the_containers_of_this_repository_are_written_by_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    written = _files(OURS)
    folder = ROOT / "containers"
    kept = {file.name: file.read_text() for file in folder.iterdir()}
    assert kept == written, f"if intended: paceline job docker {OURS} --force"


@pytest.mark.parametrize("name", LINES)
def test_hadolint_finds_nothing(name: str, project: Path) -> None:
    assert _hadolint(_files(LINES[name])["Dockerfile"]) == ""


def test_hadolint_finds_nothing_in_ours() -> None:
    assert _hadolint((ROOT / "containers" / "Dockerfile").read_text()) == ""


def test_hadolint_notices_mistakes(project: Path) -> None:
    text = _files(LINES["one"])["Dockerfile"]
    assert "DL3042" in _hadolint(text.replace(" PIP_NO_CACHE_DIR=1", ""))
    assert "DL3002" in _hadolint(text.replace("USER ${UID}", "USER root"))


@pytest.mark.parametrize("name", LINES)
def test_compose_files_fit_the_schema(name: str, project: Path) -> None:
    package = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    schema = json.loads(SCHEMA.read_text())["schema"]
    document = yaml.safe_load(_files(LINES[name])["compose.yaml"])
    validator = package.Draft202012Validator(schema)
    validator.validate(document)
    for field, value in (("shmsize", "1g"), ("shm_size", [1]), ("init", 3)):
        service = document["services"]["node-0"]
        wrong = document | {"services": {"node-0": service | {field: value}}}
        assert not validator.is_valid(wrong), field


def _services(line: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(_files(line)["compose.yaml"])
    services: dict[str, Any] = document["services"]
    return services


def test_each_node_has_its_own_gpus(project: Path) -> None:
    services = _services(LINES["gpus"])
    devices = [s["deploy"]["resources"]["reservations"]["devices"][0] for s in services.values()]
    assert [device["device_ids"] for device in devices] == [["0", "1"], ["2", "3"]]
    assert services["node-0"]["build"]["args"]["TORCH_INDEX"].endswith("/cu130")
    limits = {"cpus": "4", "memory": "8192m"}
    assert services["node-0"]["deploy"]["resources"]["limits"] == limits


def test_the_nodes_meet_at_the_first(project: Path) -> None:
    services = _services(LINES["gpus"])
    assert list(services) == ["node-0", "node-1"]
    for name, service in services.items():
        assert service["hostname"] == name
        options = read_options(service["command"][2:])
        assert str(options.endpoint) == "node-0:29400"
        assert options.node_rank == int(name[-1])
        assert service["stop_grace_period"] == "315s"
        assert service["environment"]["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "300"
        assert service["shm_size"] == "1024m"
        assert service["volumes"] == ["runs:/workspace/runs"]


def test_values_are_not_replaced_and_secrets_have_none(project: Path) -> None:
    files = _files(LINES["odd"])
    service = yaml.safe_load(files["compose.yaml"])["services"]["node-0"]
    assert service["environment"]["A"] == "$$B", "Compose replaces $B"
    assert service["environment"]["WANDB_API_KEY"] is None, "from the environment of the command"
    assert service["command"][-3:] == ["--tag", '"$$x"', "é"]
    (last,) = [line for line in files["Dockerfile"].splitlines() if line.startswith("CMD ")]
    assert json.loads(last.removeprefix("CMD "))[-3:] == ["--tag", '"$x"', "é"]


def test_what_pip_installs(project: Path) -> None:
    def pip(line: str) -> list[str]:
        text = _files(line)["Dockerfile"]
        return [
            line.partition('"${TORCH_INDEX}" ')[2]
            for line in text.splitlines()
            if "TORCH_INDEX}" in line
        ]

    version = f"paceline=={paceline.__version__}"
    assert pip("train.py") == [f"-c constraints.txt {version} -r requirements.txt"]
    (project / "requirements.txt").unlink()
    assert pip("train.py") == [f"-c constraints.txt {version}"]
    (project / "pyproject.toml").touch()
    assert pip("train.py") == ["-c constraints.txt torch", f"-c constraints.txt {version} ."]
    (project / "constraints.txt").unlink()
    assert pip("train.py") == [f"{version} ."]
    assert "COPY . ./\n" in _files("train.py")["Dockerfile"]
    assert pip("train.py --install .[a]") == ["'.[a]'"]


def test_what_is_copied_for_pip(project: Path) -> None:
    """The two files of requirements if they are enough, and otherwise the whole folder."""
    (project / "constraints.txt").unlink()
    (project / "base").mkdir()
    (project / "base" / "a b.txt").touch()
    cases = [
        (
            "rich # a/b\ntorch>=2.11; python_version > '3'\na @ git+https://b/c",
            "",
            "requirements.txt",
        ),
        ("-r base/a.txt", "", "."),
        ("./wheels/a", "", "."),
        ("", "--install=--requirement=requirements.txt", "requirements.txt"),
        ("", "--install=-rbase/a", "."),
        ("", "--install=a-1-py3-none-any.whl", "."),
        ("", "--install=libs/a", "."),
        ("", "--install=git+https://b/c", None),
    ]
    (project / "base" / "a").touch()
    for lines, option, copied in cases:
        (project / "requirements.txt").write_text(lines)
        before = _files(f"train.py {option}")["Dockerfile"].partition("\nFROM ${BASE}\n")[0]
        found = [line for line in before.splitlines() if line.startswith("COPY ")]
        assert found == ([f"COPY {copied} ./"] if copied else []), (lines, option)


@pytest.mark.parametrize("name", LINES)
def test_no_path_of_this_machine_is_in_the_files(name: str, project: Path) -> None:
    text = "".join(_files(LINES[name]).values())
    assert str(project) not in text
    assert str(Path.home()) not in text.replace("/root/", "")
    assert sys.prefix not in text


WRONG = {
    "--time 4h": "there is no option '--time'.",
    "--name A": "--name 'A' is not a valid Compose name.",
    "--base Python": "--base 'Python' is not a valid image name.",
    "--image a:": "--image 'a:' is not a valid image name.",
    "--secret A=b/c": "--secret A has the reference 'b/c', and Compose knows none.",
    "--output ..": "--output is '..', outside of this folder.",
    "--install -r=x": "--install needs a value.",
    "--install=-rmore.txt": "--install names the file 'more.txt', and this folder has none of that name.",
    "--install='": "--install cannot be read: No closing quotation.",
    "--install=": "--install is ''.",
    "--run-folder runs": "--run-folder is 'runs', and a volume cannot be mounted there.",
    "--run-folder /workspace": "--run-folder is '/workspace', and a volume cannot be mounted there.",
    "--run-folder /dev/shm": "--run-folder is '/dev/shm', and a volume cannot be mounted there.",
    "--run-folder /opt/venv/a": "--run-folder is '/opt/venv/a', and a volume cannot be mounted there.",
    "--run-folder /a/..": "--run-folder is '/a/..', and a volume cannot be mounted there.",
    "--install=-e.": "--install has -e, and an editable project needs its folder, which the image does not "
    "have.",
    "--name train-": "--name 'train-' is not a valid image name.",
    "--output -": "`paceline job docker` always writes 3 files, and `--output -` prints only one.",
}


@pytest.mark.parametrize(
    ("content", "what", "fix"),
    [
        (b"-e.", "has a line with -e", "name the project without -e"),
        (b"--editable=.", "has a line with -e", "name the project without -e"),
        (b"\xef\xbb\xbf-e .", "has a line with -e", "name the project without -e"),
        ("rich".encode("utf-16"), "requirements.txt is not UTF-8.", "save it as UTF-8."),
    ],
)
def test_requirements_that_are_refused(
    content: bytes, what: str, fix: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "requirements.txt").write_bytes(content)
    assert main.main(["job", "docker", "train.py"]) == ExitCode.USAGE
    printed = capsys.readouterr().err
    assert what in printed
    assert fix in printed


def test_the_help_does_not_offer_to_print(capsys: pytest.CaptureFixture[str]) -> None:
    for scheduler in ("docker", "k8s"):
        with pytest.raises(SystemExit):
            main.main(["job", scheduler, "--help"])
        assert ("prints the file" in capsys.readouterr().out) == (scheduler == "k8s")


@pytest.mark.parametrize("line", WRONG)
def test_wrong_input(line: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(project.iterdir())
    try:
        code = main.main(["job", "docker", "train.py", *line.split()])
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == ExitCode.USAGE
    printed = capsys.readouterr()
    assert (printed.out, printed.err.splitlines()[0]) == ("", f"paceline job docker: {WRONG[line]}")
    assert "  fix:   " in printed.err
    assert sorted(project.iterdir()) == before
