"""The scripts of `paceline completion`, run by the shells themselves."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment

from paceline.cli.main import COMMANDS

COMMAND = f"{sys.executable} -m paceline completion"

# A line, and what the shell offers to complete its last word.
OFFERED = {
    "paceline ": set(COMMANDS),
    "paceline ver": {"verify"},
    "paceline run --on-h": {"--on-hang"},
    "paceline run --on-hang ": {"report", "end"},
    "paceline run --nproc-per-node 2 tr": {"train.py"},
    "paceline verify --ste": {"--steps"},
    "paceline ckpt ": {"ls", "show", "check", "export", "rm"},
    "paceline ckpt rm runs/a --st": {"--step"},
    "paceline job k8s tr": {"train.py"},
    "paceline job k8s --kind ": {"job", "jobset", "trainjob"},
    "paceline job docker --run-f": {"--run-folder"},
    "paceline completion ": {"bash", "zsh", "fish"},
    "paceline explain lo": {"log.txt"},
    "paceline report ru": {"runs"},
    "paceline init --trainer tr": {"train.py"},
}

BASH = """
source <(COMMAND bash)
name=$(complete -p paceline | sed 's/.* -F \\([^ ]*\\) .*/\\1/')
while IFS= read -r line; do
  read -ra COMP_WORDS <<< "$line"
  [[ $line == *' ' ]] && COMP_WORDS+=('')
  COMP_LINE=$line COMP_POINT=${#line} COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
  $name paceline "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"
  echo "${COMPREPLY[*]}"
done
"""
FISH = """
COMMAND fish | source
while read -l line
  complete -C "$line" | string replace -r '\\t.*' '' | string join ' '
end
"""
ZSH = """
COMMAND zsh > ~/_paceline
fpath+=~; autoload -Uz compinit; compinit -u -D; PROMPT='ready> '
paceline() { print -r -- "completed to: paceline $*" }
"""


def _need(shell: str) -> str:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("train.py", "log.txt"):
        (tmp_path / name).touch()
    (tmp_path / "runs").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("shell", "options", "script"), [("bash", ["--norc", "-c"], BASH), ("fish", ["-N", "-c"], FISH)]
)
@pytest.mark.ci
def test_what_a_shell_offers(shell: str, options: list[str], script: str, folder: Path) -> None:
    done = subprocess.run(
        [_need(shell), *options, script.replace("COMMAND", COMMAND)],
        input="".join(f"{line}\n" for line in OFFERED),
        cwd=folder,
        env=environment(HOME=str(folder)),
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    offered = [{name.rstrip("/") for name in line.split()} for line in done.stdout.splitlines()]
    assert dict(zip(OFFERED, offered, strict=True)) == OFFERED


def test_zsh_completes_typed_words(folder: Path) -> None:
    shell = _need("zsh")
    (folder / ".zshrc").write_text(ZSH.replace("COMMAND", COMMAND))
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        [shell, "-i"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=folder,
        env=environment(HOME=str(folder), ZDOTDIR=str(folder), TERM="dumb"),
    )
    os.close(terminal)
    unique = {line: names for line, names in OFFERED.items() if len(names) == 1}
    found = {}
    try:
        _read_until(main, "ready> ")
        for line in unique:
            os.write(main, f"{line}\t\n".encode())
            printed = _read_until(main, "\ncompleted to: ", "ready> ")
            found[line] = printed.rpartition("completed to: ")[2].splitlines()[0].rstrip(" /\r")
    finally:
        process.kill()
        process.wait()
        os.close(main)
    assert found == {line: f"{line.rpartition(' ')[0]} {name}" for line, (name,) in unique.items()}


def _read_until(terminal: int, *texts: str) -> str:
    """What the terminal shows until these texts have come one after the other."""
    printed, position = "", 0
    for text in texts:
        while (at := printed.find(text, position)) < 0:
            printed += os.read(terminal, 4096).decode()
        position = at + len(text)
    return printed
