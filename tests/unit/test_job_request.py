"""`paceline job`: times, sizes, wrong input, and the files that it writes; for all schedulers."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import job, main
from paceline.errors import ConfigError
from paceline.exit_codes import ExitCode
from paceline.schedulers.request import JobRequest, duration_s, memory_mib

K8S = ["job", "k8s", "train.py", "--image", "me/train:1"]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("4h", 14400),
        ("90m", 5400),
        ("45s", 45),
        ("1d12h", 129600),
        ("1h30m", 5400),
        ("04:00:00", 14400),
        ("1-00:00:00", 86400),
        ("100:00:00", 360000),
    ],
)
def test_times(text: str, seconds: int) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "0", "0m", "4", "60", "12:30", "4 h", "-4h", "4H", "1.5h", "h", "30m4h", "1:60:00", "inf"],
)
def test_times_that_are_refused(text: str) -> None:
    # "4" and "12:30" are minutes for some schedulers, and seconds or hours for others.
    with pytest.raises(argparse.ArgumentTypeError, match=r"must be .*, and is"):
        duration_s(text)


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("512M", 512),
        ("64G", 65536),
        ("64Gi", 65536),
        ("64GiB", 65536),
        ("64gb", 65536),
        ("1T", 1 << 20),
    ],
)
def test_sizes(text: str, mib: int) -> None:
    assert memory_mib(text) == mib


@pytest.mark.parametrize("text", ["", "64", "0G", "-1G", "1.5G", "64 G", "G", "64K", "64Gib2"])
def test_sizes_that_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be a size"):
        memory_mib(text)


def test_ranks_of_a_node() -> None:
    assert JobRequest("a.py").ranks_per_node == 1
    assert JobRequest("a.py", gpus=8).ranks_per_node == 8
    assert JobRequest("a.py", gpus=8, ranks=4).ranks_per_node == 4
    assert JobRequest("a.py", ranks=4).ranks_per_node == 4


def test_the_command_of_a_module() -> None:
    command = JobRequest("pack.train", ("--lr", "1"), module=True).command("--nnodes=2")
    assert command[:3] == ["paceline", "run", "--nnodes=2"]
    assert command[-4:] == ["-m", "pack.train", "--lr", "1"]


WRONG = {
    "--gpus 16 --gpus 17": "--gpus must be at most 16, got 17.",
    "--gpus -1": "--gpus must be 0 or more, and is -1.",
    "--nodes 0": "--nodes must be 1 or more, and is 0.",
    "--nodes -2": "--nodes must be 1 or more, and is -2.",
    "--nodes two": "--nodes must be a whole number, and is 'two'.",
    "--cpus 0": "--cpus must be 1 or more, and is 0.",
    "--memory 64": "--memory must be a size such as 512M or 64G, and is '64'.",
    "--memory -1G": "--memory needs a value.",
    "--time 4": "--time must be a time such as 90m, 4h, 1d12h or 1-00:00:00, and is '4'.",
    "--time 2m": "--time is 120 s, and a job needs more than 135 s.",
    "--grace 0s": "--grace must be more than 0, and is '0s'.",
    "--max-restarts -1": "--max-restarts must be 0 or more, and is -1.",
    "--gpus 2 --nproc-per-node 4": "--nproc-per-node is 4, and a node has 2 GPUs.",
    "--env A": "--env must be NAME=VALUE, and is 'A'.",
    "--env 1A=2": "--env must be NAME=VALUE, and is '1A=2'.",
    "--env A=1 --secret A=b/c": "A is given by --env and by --secret.",
    "--env WANDB_API_KEY=x": "--env would write the value of WANDB_API_KEY into the file.",
    "--env hf_token=x": "--env would write the value of hf_token into the file.",
    "--env AZURE_STORAGE_CONNECTION_STRING=AccountKey=a": "--env would write the value of "
    "AZURE_STORAGE_CONNECTION_STRING into the file.",
    "--env DB_PASS=x": "--env would write the value of DB_PASS into the file.",
    "--env A=1 --env A=2": "--env gives A twice.",
    "--env TORCH_ELASTIC_SHUTDOWN_TIMEOUT=5": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT follows from --grace.",
    "--secret a-b": "--secret must be the name of an environment variable, and is 'a-b'.",
    "--lr 0.1": "there is no option '--lr'.",
    "--n 2": "'--n' is not the full name of an option.",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_input_is_one_error(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _code([*K8S, *line.split()]) == ExitCode.USAGE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"paceline job k8s: {WRONG[line]}\n")
    assert "  fix:   " in printed.err
    assert list(Path.cwd().iterdir()) == [Path.cwd() / "train.py"]


def _code(words: list[str]) -> int:
    try:
        return main.main(words)
    except SystemExit as error:
        return int(error.code or 0)


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        ("k8s trian.py --image a", "there is no script 'trian.py'", "did you mean 'train.py'"),
        ("k8s folder --image a", "there is no script 'folder'", "go to the folder of the project"),
        ("k8s \udcff.py --image a", "'\\udcff.py' has bytes that are not UTF-8", "another name"),
        ("k8s {here}/train.py --image a", "is a path of this machine", "this folder: train.py"),
        ("k8s ../{name}/train.py --image a", "train.py' is outside of this folder", "in the image"),
        ("docker ../{name}/train.py", "train.py' is outside of this folder", "in the image"),
        ("k8s --image a", "missing: SCRIPT", "see `paceline job k8s --help`"),
        ("k8 train.py", "'k8' is not a valid SCHEDULER", "did you mean 'k8s'"),
        ("", "missing: SCHEDULER", "see `paceline job --help`"),
    ],
)
def test_wrong_scripts_and_schedulers(
    words: str, what: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("folder").mkdir()
    assert (
        _code(["job", *words.format(here=Path.cwd(), name=Path.cwd().name).split()])
        == ExitCode.USAGE
    )
    printed = capsys.readouterr().err
    assert what in printed
    assert fix in printed


def test_an_absolute_path_may_be_one_of_the_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["job", "k8s", "/opt/project/train.py", "--image", "me/train:1", "--output", "-"]
    assert main.main(words) == ExitCode.OK
    assert "- /opt/project/train.py\n" in capsys.readouterr().out


def test_files_are_stable_and_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(K8S) == ExitCode.OK
    file = Path("train.k8s.yaml")
    text = file.read_text()
    assert main.main(K8S) == ExitCode.OK, "the same content is no conflict"
    assert main.main([*K8S, "--nodes", "2"]) == ExitCode.CANNOT_CREATE
    assert "train.k8s.yaml exists with another content" in capsys.readouterr().err
    assert file.read_text() == text
    assert main.main([*K8S, "--nodes", "2", "--force"]) == ExitCode.OK
    assert file.read_text() != text


def test_the_output_folder_is_made_and_is_in_no_file() -> None:
    assert main.main([*K8S, "--output", str(Path.cwd() / "deploy" / "a")]) == ExitCode.OK
    text = (Path.cwd() / "deploy" / "a" / "train.k8s.yaml").read_text()
    assert str(Path.cwd()) not in text
    assert str(Path.home()) not in text


def test_a_folder_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*K8S, "--output", "train.py/a"]) == ExitCode.CANNOT_CREATE
    assert "cannot be written" in capsys.readouterr().err


def test_a_file_that_is_no_text_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.k8s.yaml").write_bytes(b"\xff")
    assert main.main(K8S) == ExitCode.CANNOT_CREATE
    assert "exists with another content" in capsys.readouterr().err


def test_several_files_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*K8S, "--storage", "1G", "--output", "-"]) == ExitCode.USAGE
    assert "`--output -` prints one file, and there are 2" in capsys.readouterr().err


def test_arguments_of_the_script_are_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*K8S, "--output", "-", "--", "--nodes", "-1", "--"]) == ExitCode.OK
    assert '- train.py\n            - --nodes\n            - "-1"\n            - "--"\n' in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("scheduler", job.SCHEDULERS)
def test_a_scheduler_has_what_the_protocol_says(scheduler: str) -> None:
    module = job._scheduler(scheduler)
    assert module.HELP
    assert module.EXAMPLES
    assert all(line.startswith(f"paceline job {scheduler} ") for line in module.EXAMPLES)
    assert callable(module.add_options)
    assert callable(module.write)


def test_the_command_does_not_import_torch() -> None:
    code = (
        "import sys; from paceline.cli.main import main\n"
        f"main({[*K8S, '--output', '-']!r}); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "yaml", "psutil"} & set(done.stdout.split())


PAGES = Path(__file__).parents[2] / "docs" / "howto"
SHOWN = [
    line.partition("  #")[0]
    for page in PAGES.glob("*.md")
    for line in re.findall(r"^paceline job .*$", page.read_text(), re.M)
]


@pytest.mark.parametrize("line", SHOWN)
def test_commands_of_the_documentation(line: str, project: Path) -> None:
    (project / "examples").mkdir()
    (project / "examples" / "digits.py").touch()
    assert main.main(shlex.split(line)[1:]) == ExitCode.OK


def test_a_request_checks_itself() -> None:
    with pytest.raises(ConfigError, match="--gpus must be at most 16, got 64"):
        JobRequest("a.py", gpus=64)
