"""`paceline job slurm`: golden files, the shell's own check, and wrong input. test_slurm.py submits them."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.exit_codes import ExitCode
from paceline.launch.options import read_options

DATA = Path(__file__).parents[1] / "data" / "jobs"
# Write a golden file again with: cd tests/data/jobs && paceline job slurm LINE --force
CASES = {
    "train": "/project/train.py --nodes 2 --gpus 8 --time 4h",
    "one": "--name one /project/train.py -- --tag $(x) a;b",
    "module": "-m pack.train --name module --nodes 4 --gpus 2 --cpus 16 --memory 64G --time 1-12:00:00 "
    "--grace 5m --partition gpu --account me --sbatch constraint=a100 --sbatch exclusive --run-folder "
    "/runs/a --env NCCL_DEBUG=WARN --env GREETING=it's --secret WANDB_API_KEY -- --lr 0.1",
}


def _write(line: str, folder: Path) -> dict[str, str]:
    assert main.main(["job", "slurm", "--output", str(folder), *line.split()]) == ExitCode.OK
    return {file.name: file.read_text() for file in folder.iterdir()}


@pytest.mark.parametrize("name", CASES)
def test_the_script_is_that_in_the_repository(name: str, tmp_path: Path) -> None:
    written = _write(CASES[name], tmp_path)
    assert list(written) == [f"{name}.slurm"]
    golden = {file: (DATA / file).read_text() for file in written}
    assert written == golden, (
        f"if intended: cd tests/data/jobs && paceline job slurm {CASES[name]} --force"
    )


def test_all_golden_files_are_written_by_a_case() -> None:
    assert sorted(file.stem for file in DATA.glob("*.slurm")) == sorted(CASES)


@pytest.mark.parametrize("name", CASES)
def test_bash_can_read_the_script(name: str) -> None:
    done = subprocess.run(["bash", "-n", DATA / f"{name}.slurm"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", CASES)
def test_no_path_of_this_machine_is_in_the_script(name: str) -> None:
    text = (DATA / f"{name}.slurm").read_text()
    assert str(Path(__file__).parents[2]) not in text
    assert str(Path.home()) not in text


def _command(name: str) -> list[str]:
    lines = (DATA / f"{name}.slurm").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("srun ")]
    return shlex.split(line.removesuffix(" || code=$?"))


def test_the_command_starts_a_launcher_that_takes_the_rest_from_slurm() -> None:
    words = _command("module")
    assert words[:4] == ["srun", "--cpus-per-task=$SLURM_CPUS_PER_TASK", "paceline", "run"]
    options = read_options(words[4:])
    assert (options.args.training_script, options.args.module) == ("pack.train", True)
    assert options.args.training_script_args == ["--lr", "0.1"]
    assert (options.config.nproc_per_node, options.args.host) == (2, None)


def test_words_of_the_script_are_quoted() -> None:
    assert _command("one")[-3:] == ["--tag", "$(x)", "a;b"]


def test_values_reach_the_job_and_secrets_do_not_reach_the_file(tmp_path: Path) -> None:
    text = (DATA / "module.slurm").read_text()
    body = text.partition("\nsrun ")[0] + '\necho "$GREETING $NCCL_DEBUG"\n'
    words = ["bash", "-c", body]
    done = subprocess.run(words, env={"WANDB_API_KEY": "x"}, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("it's WARN\n", "")
    done = subprocess.run(words, env={}, capture_output=True, text=True)
    assert done.returncode != 0
    assert "WANDB_API_KEY: set it in the shell that calls sbatch" in done.stderr


def test_only_a_preempted_job_is_queued_again(tmp_path: Path) -> None:
    words = ["job", "slurm", "/project/train.py", "--setup", "set -e", "--output", str(tmp_path)]
    assert main.main(words) == ExitCode.OK
    text = (tmp_path / "train.slurm").read_text()
    for code, queued in ((0, ""), (1, ""), (75, "requeue 7\n")):
        fakes = f'scontrol() {{ echo "$@"; }}\nsrun() {{ return {code}; }}\n'
        done = subprocess.run(
            ["bash", "-c", fakes + text],
            env={"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout) == (code, queued), done.stderr


WRONG = {
    "--gpus 17": "--gpus must be at most 16, got 17.",
    "--gpus 2 --nproc-per-node 4": "--nproc-per-node is 4, and a node has 2 GPUs.",
    "--time 1m": "--time is 60 s, and a job needs more than 135 s.",
    "--name a/b": "--name is 'a/b'.",
    "--partition a;b": "--partition is 'a;b'.",
    "--sbatch nodes=3": "--sbatch nodes contradicts what is written already.",
    **{
        f"--sbatch {option}=1": f"--sbatch {option} contradicts what is written already."
        for option in (
            "no-requeue",
            "ntasks",
            "ntasks-per-gpu",
            "gpus",
            "gres",
            "mem-per-cpu",
            "account",
        )
    },
    "--grace 19h": "--grace must be at most 65520 s, got 68400 s.",
    "--run-folder /my%20runs": "--run-folder is '/my%20runs', and sbatch cannot write its output there.",
    "--sbatch --qos": "--sbatch needs a value.",
    "--sbatch=--qos": "--sbatch is '--qos'.",
    "--secret A=b/c": "--secret A has the reference 'b/c', and Slurm knows none.",
}


@pytest.mark.parametrize("folder", ["/my runs", "/a\nrm -rf b", "~/runs"])
def test_a_run_folder_cannot_add_lines_or_options(folder: str, tmp_path: Path) -> None:
    words = ["/project/train.py", "--output", str(tmp_path), "--run-folder", folder]
    assert main.main(["job", "slurm", *words]) == ExitCode.USAGE
    assert list(tmp_path.iterdir()) == []


def test_the_next_steps_name_files_that_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write("--name a --run-folder /runs/a /project/train.py", tmp_path)
    steps = [line.strip() for line in capsys.readouterr().out.splitlines()[1:]]
    assert steps[1:] == [
        f"sbatch {tmp_path}/a.slurm",
        "tail -F /runs/a/a-JOBID.out   # the output; sbatch prints JOBID",
    ]


@pytest.mark.parametrize("line", WRONG)
def test_wrong_input(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = main.main(["job", "slurm", "/project/train.py", *line.split()])
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == ExitCode.USAGE
    printed = capsys.readouterr()
    assert (printed.out, printed.err.splitlines()[0]) == ("", f"paceline job slurm: {WRONG[line]}")
    assert list(tmp_path.iterdir()) == []
