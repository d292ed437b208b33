"""`paceline job`: golden files, the checks of each format, words of any kind, and wrong input.

test_slurm.py and test_kubernetes_pods.py run what it writes.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli import main
from paceline.exit_codes import ExitCode
from paceline.launch.options import read_options

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "data" / "jobs"
# Write the files again with: cd tests/data/jobs && paceline job LINE --force
CASES = (
    "slurm /project/train.py --nodes 2 --gpus 8 --time 4h",
    "slurm -m pack.train --name module --nodes 4 --gpus 2 --cpus 16 --memory 64G --time 1d12h --grace 5m "
    "--run-folder /runs/a -- --lr 0.1",
    "k8s /workspace/train.py --image registry.example:5000/me/train:1.2 --nodes 2 --gpus 8 --cpus 64 "
    "--memory 512G --time 1d -- --lr 0.1",
    "k8s /workspace/train.py --name jobset --image me/train:1 --kind jobset --nodes 4 --gpus 1 --grace 5m",
    "k8s -m pack.train --name trainjob --image me/train:1 --kind trainjob --nproc-per-node 2 "
    "--run-folder /runs",
)
KUBERNETES = [case for case in CASES if case.startswith("k8s")]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").touch()
    monkeypatch.chdir(folder)
    return folder


def _code(words: list[str]) -> int:
    try:
        return main.main(["job", *words])
    except SystemExit as error:
        return int(error.code or 0)


def _write(line: str, *script: str) -> dict[str, str]:
    """The files that a command writes."""
    own, _, more = line.partition(" -- ")
    assert _code([*own.split(), "--output", "out", "--", *more.split(), *script]) == ExitCode.OK
    return {file.name: file.read_text() for file in Path("out").iterdir()}


def _documents(line: str) -> dict[str, Any]:
    """The documents of Kubernetes by kind."""
    texts = _write(line).values()
    return {document["kind"]: document for text in texts for document in yaml.safe_load_all(text)}


def test_the_files_are_those_in_the_repository() -> None:
    written = {name: text for case in CASES for name, text in _write(case).items()}
    kept = {file.name: file.read_text() for file in GOLDEN.iterdir()}
    assert written == kept


def test_the_containers_of_this_repository_are_written_by_the_command(project: Path) -> None:
    """Besides the extras that are installed."""
    (project / "examples").mkdir()
    for name in ("examples/digits.py", "pyproject.toml", "constraints.txt"):
        (project / name).touch()
    written = _write("docker examples/digits.py --nodes 2")
    kept = {file.name: file.read_text() for file in (ROOT / "containers").iterdir()}
    install = r"(?<=-c constraints.txt )paceline==\S+ \.$"
    written["Dockerfile"] = re.sub(install, "'.[examples]'", written["Dockerfile"], flags=re.M)
    assert {name: text.replace("out/", "containers/") for name, text in written.items()} == kept


@pytest.mark.parametrize("version", ["1.31", "1.37"])  # podFailurePolicy is stable since 1.31
@pytest.mark.parametrize("case", KUBERNETES)
def test_documents_fit_the_schema_of_kubernetes(case: str, version: str) -> None:
    reason = "kubernetes-validate is not installed"
    package = pytest.importorskip("kubernetes_validate", reason=reason)
    for kind, document in _documents(case).items():
        if kind in ("Service", "Job", "PersistentVolumeClaim"):
            package.validate(document, version, strict=True)
        elif kind != "TrainJob":  # custom resources with a Job in them
            spec = document["spec"].get("template", document)["spec"]
            (job,) = spec["replicatedJobs"]
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, **job["template"]}
            package.validate(job, version, strict=True)


def _hadolint(text: str) -> str:
    path = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")
    if path is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([path, "-"], input=text, capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize("has_constraints", [False, True])
def test_hadolint_finds_nothing(has_constraints: bool, project: Path) -> None:
    (project / "requirements.txt").touch()
    if has_constraints:
        (project / "constraints.txt").touch()
    text = _write("docker train.py --nodes 2 --gpus 2")["Dockerfile"]
    assert _hadolint(text) == ""
    assert "DL3002" in _hadolint(text.replace("USER ${UID}", "USER root"))


NASTY = [
    *("$(rm -rf x)", "`x`", "$HOME", "${A}", "$$", "a;b", "a b", "it's", '"', "\\", "\\n", "é😀"),
    *("yes", "null", "~", "1e3", "12:30", "- a", "a: b", "a #b", "", "{{name}}", "%j", "&a", "*"),
]


def test_words_of_the_script_arrive_as_they_were_typed(project: Path) -> None:
    script = _write("slurm train.py", *NASTY)["train.slurm"]
    fakes = "srun() { shift; printf '%s\\0' \"$@\"; }\n"
    done = subprocess.run(["bash", "-c", fakes + script], capture_output=True, text=True)
    assert done.stdout.split("\0")[-len(NASTY) - 2 : -1] == ["train.py", *NASTY]

    (job,) = (
        document
        for document in yaml.safe_load_all(
            _write("k8s train.py --image a", *NASTY)["train.k8s.yaml"]
        )
        if document["kind"] == "Job"
    )
    (container,) = job["spec"]["template"]["spec"]["containers"]
    words = [word.replace("$$(", "$(") for word in container["command"][-len(NASTY) :]]
    assert words == NASTY
    assert not any(re.search(r"(?<!\$)\$\(", word) for word in container["command"])

    files = _write("docker train.py", *NASTY)
    services = yaml.safe_load(files["compose.yaml"])["services"]
    words = services["node-0"]["command"][-len(NASTY) :]
    assert [word.replace("$$", "$") for word in words] == NASTY
    assert not any("$" in word.replace("$$", "") for word in words)
    (command,) = re.findall(r"^CMD (.*)$", files["Dockerfile"], re.M)
    assert json.loads(command)[-len(NASTY) :] == NASTY


def test_only_a_preempted_job_is_queued_again() -> None:
    text = _write("slurm train.py")["train.slurm"]
    for code, queued in ((0, ""), (1, ""), (75, "requeue 7\n")):
        # `set -e` may be one of the commands that the user adds.
        fakes = f'set -e; scontrol() {{ echo "$@"; }}\nsrun() {{ return {code}; }}\n'
        variables = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"}
        done = subprocess.run(
            ["bash", "-c", fakes + text], env=variables, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (code, queued), done.stderr


def test_nodes_meet_at_the_first() -> None:
    documents = _documents("k8s train.py --image a --nodes 2 --gpus 4")
    pod = documents["Job"]["spec"]["template"]["spec"]
    service = documents["Service"]
    # Kubernetes names a pod JOB-INDEX.SUBDOMAIN if a headless Service has the name of the subdomain.
    assert pod["subdomain"] == service["metadata"]["name"] == "train"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "train"}
    words = pod["containers"][0]["command"][2:]
    options = read_options([word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in words])
    assert str(options.endpoint) == "train-0.train:29400"
    assert (options.node_rank, options.max_nodes, options.nproc) == (1, 2, 4)

    services = yaml.safe_load(_write("docker train.py --nodes 2 --gpus 2")["compose.yaml"])[
        "services"
    ]
    for rank, (name, service) in enumerate(services.items()):
        options = read_options(service["command"][2:])
        assert (str(options.endpoint), options.node_rank) == ("node-0:29400", rank)
        assert name == service["hostname"] == f"node-{rank}"
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["device_ids"] == [str(2 * rank), str(2 * rank + 1)]


def test_the_command_for_a_runtime_of_kubeflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch-distributed` sets these variables; the documentation has the command."""
    variables = {"NNODES": "2", "NPROC_PER_NODE": "4", "NODE_RANK": "1", "MASTER_PORT": "29500"}
    for name, value in variables.items():
        monkeypatch.setenv(f"PET_{name}", value)
    monkeypatch.setenv("PET_MASTER_ADDR", "a-node-0-0.a")
    (page,) = (ROOT / "docs").rglob("kubernetes.md")
    (line,) = re.findall(r"`paceline run (.*)`", page.read_text())
    options = read_options(line.replace("$(PET_MASTER_ADDR)", "a-node-0-0.a").split())
    assert str(options.endpoint) == "a-node-0-0.a:29400"
    assert (options.node_rank, options.max_nodes, options.nproc) == (1, 2, 4)


def test_the_grace_period_is_longer_than_that_of_the_launcher() -> None:
    pod = _documents("k8s train.py --image a --grace 5m")["Job"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["env"][0]["value"] == "300"
    assert pod["terminationGracePeriodSeconds"] == 315


@pytest.mark.parametrize(
    ("script", "name"),
    [("My_Train-2.py", "my-train-2"), ("_train_.py", "train"), ("train.v2.py", "train-v2")],
)
def test_the_name_of_the_script_becomes_a_name_of_kubernetes(script: str, name: str) -> None:
    assert f"{name}.k8s.yaml" in _write(f"k8s /a/{script} --image a")


COMMON = {
    "--gpus 17": "--gpus must be at most 16, got 17.",
    "--gpus 2 --nproc-per-node 4": "--nproc-per-node is 4, and a node has 2 GPUs.",
    "--memory 64": "--memory: must be a size such as 512M or 64G, and is '64'.",
    # Minutes for some schedulers, and seconds or hours for others.
    "--grace 4": "--grace: must be a time such as 90m, 4h or 1d12h, and is '4'.",
    "--lr 0.1": "unrecognized arguments: --lr",
    "--name a\u2028b": "'a\\u2028b' has characters that cannot be printed.",
}
FOLDERS = ("runs", "/workspace", "/opt/venv/a", "/a/..", "/a$b")
WRONG = [
    *(("slurm train.py", option, what) for option, what in COMMON.items()),
    ("slurm train.py", "--time 1m", "--time is 60 s, and a job needs more than 135 s."),
    ("slurm train.py", "--name a/b", "--name 'a/b' is not a valid name."),
    ("slurm train.py", "--run-folder=/my%20runs", "sbatch cannot write its output there."),
    ("k8s train.py", "", "are required: --image"),
    ("k8s train.py", "--image=Me/train:1", "--image 'Me/train:1' is not a valid image name."),
    *(
        ("k8s train.py --image a", f"--name={name}", f"--name {name!r} is not a valid name.")
        for name in ("my_train", "1st", "a" * 62)
    ),
    *(
        ("docker train.py", f"--run-folder={folder}", "a volume cannot be mounted there.")
        for folder in FOLDERS
    ),
    ("docker train.py", "--name A", "--name 'A' is not a valid name."),
    ("k8s trian.py --image a", "", "there is no script 'trian.py'"),
    ("k8s {here}/train.py --image a", "", "is a path of this machine"),
    ("docker ../project/train.py", "", "train.py' is outside of this folder"),
]


@pytest.mark.parametrize(("line", "option", "what"), WRONG)
def test_wrong_input(
    line: str, option: str, what: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*line.format(here=project).split(), *option.split(" ")]
    assert _code([word for word in words if word]) == ExitCode.USAGE
    printed = capsys.readouterr()
    assert what in printed.err
    assert (printed.out, "  fix:   " in printed.err) == ("", True)
    assert [file.name for file in project.iterdir()] == ["train.py"]


def test_files_are_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["slurm", "train.py"]
    assert _code(line) == _code(line) == ExitCode.OK, "the same content is no conflict"
    before = Path("train.slurm").read_bytes()
    assert _code([*line, "--nodes", "2"]) == ExitCode.CANNOT_CREATE
    assert "train.slurm exists with another content" in capsys.readouterr().err
    assert Path("train.slurm").read_bytes() == before
    assert _code([*line, "--nodes", "2", "--force"]) == ExitCode.OK
    assert Path("train.slurm").read_bytes() != before
    assert _code([*line, "--output", "train.py/a"]) == ExitCode.CANNOT_CREATE
    assert "cannot be written" in capsys.readouterr().err


def test_the_command_does_not_import_torch() -> None:
    code = (
        "import sys; from paceline.cli.main import main\n"
        "main(['job', 'slurm', 'train.py']); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "yaml", "psutil"} & set(done.stdout.split())
