"""Folders that are not those of a whole run: each command shows what is there, and tells what is not."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_report import write_run

from paceline.checkpoint import manifest
from paceline.checkpoint.manifest import Chunk, Manifest, SavedTensor
from paceline.cli.main import main
from paceline.clock import record
from paceline.exit_codes import ExitCode

STEP = 20  # of the checkpoint


def _write_checkpoint(folder: Path, ranks: int) -> None:
    """A checkpoint of one tensor of 4 bytes for each rank."""
    inner = folder / "checkpoints" / f"step-{STEP}"
    inner.mkdir(parents=True)
    names = [f"rank-{rank}.bin" for rank in range(ranks)]
    digest = (
        "df3f619804a92fdb4057192dc43dd748ea778adc52bc498ce80524c014b81119"  # of four zero bytes
    )
    chunks = tuple(Chunk((rank,), (1,), name, 0, digest) for rank, name in enumerate(names))
    for name in names:
        (inner / name).write_bytes(bytes(4))
    found = Manifest(
        step=STEP,
        best=False,
        world_size=ranks,
        saved_at=1e9,
        versions={"paceline": "1.0"},
        files=dict.fromkeys(names, 4),
        tree={"step": STEP},
        tensors={"models.0.weight": SavedTensor("float32", (ranks,), chunks)},
    )
    (inner / manifest.NAME).write_text(found.render())


def _whole(folder: Path, ranks: int = 2, **run: int) -> None:
    write_run(folder, steps=50, ranks=ranks, **run)
    _write_checkpoint(folder, ranks)


def _empty(folder: Path) -> None:
    folder.mkdir()


def _running(folder: Path) -> None:
    _whole(folder, total_steps=345)
    unfinished = folder / "checkpoints/unfinished-step-40"
    shutil.copytree(folder / f"checkpoints/step-{STEP}", unfinished)
    (unfinished / manifest.NAME).unlink()


def _torn(folder: Path) -> None:
    _whole(folder)
    for path in folder.rglob("*"):
        if path.suffix in (".jsonl", ".json"):
            path.write_bytes(path.read_bytes()[:-30])


def _older(folder: Path) -> None:
    """Without the file of the step clock; the checkpoint has a format that is read no more."""
    _whole(folder)
    (folder / record.FILE).unlink()
    path = folder / f"checkpoints/step-{STEP}" / manifest.NAME
    *_, body = path.read_text().split('"', 4)
    body = '"' + body.replace('"format": 3', '"format": 1')
    path.write_text(f'{{"sha256": "{hashlib.sha256(body[:-1].encode()).hexdigest()}{body}')


def _many(folder: Path) -> None:
    _whole(folder, ranks=4096)


def _other(folder: Path) -> None:
    folder.mkdir()
    (folder / "notes.txt").write_text("x")
    (folder / "settings.json").write_text(json.dumps({"step": 1}))


def _file(folder: Path) -> None:
    folder.write_text("x")


@dataclass(frozen=True)
class Case:
    """How a folder is made, and by command: the exit code and what is printed, on whichever stream."""

    make: Callable[[Path], None]
    report: tuple[int, str]
    top: tuple[int, str]
    ls: tuple[int, str]
    check: tuple[int, str]


OK, DATA = ExitCode.OK, ExitCode.DATA
CASES = {
    "empty": Case(
        _empty,
        report=(DATA, "is not the folder of a run: it holds no metrics.jsonl"),
        top=(DATA, "is not the folder of a run: it holds no metrics.jsonl"),
        ls=(DATA, "it is empty or missing"),
        check=(DATA, "it is empty or missing"),
    ),
    "running": Case(
        _running,
        report=(OK, "The run has not reached its last step."),
        top=(OK, "step 50/345"),
        ls=(OK, f"{STEP}         0.0      2"),
        check=(OK, f"step {STEP}: whole"),
    ),
    "torn": Case(
        _torn,
        report=(
            OK,
            f"The checkpoint of step {STEP} is left out: manifest.json does not match its digest.",
        ),
        top=(OK, "The last line of clock.jsonl is incomplete"),
        ls=(OK, "manifest.json does not match its digest"),
        check=(DATA, f"step {STEP}: damaged: manifest.json does not match its digest"),
    ),
    "of an older version": Case(
        _older,
        report=(OK, "it has format 1, and this release reads 3"),
        top=(OK, "There is no clock.jsonl: the run was made by an older version"),
        ls=(OK, "it has format 1, and this release reads 3"),
        check=(DATA, f"step {STEP}: cannot be read"),
    ),
    "of 4,096 ranks": Case(
        _many,
        report=(OK, "The 16 slowest of 4096 ranks are shown"),
        top=(OK, "rank 4095"),
        ls=(OK, f"{STEP}         0.0   4096"),
        check=(OK, f"step {STEP}: whole, 16,384 bytes"),
    ),
    "not of a run": Case(
        _other,
        report=(DATA, "is not the folder of a run"),
        top=(DATA, "is not the folder of a run"),
        ls=(DATA, "there is no checkpoint of Paceline"),
        check=(DATA, "there is no checkpoint of Paceline"),
    ),
    "a file": Case(
        _file,
        report=(DATA, "is a file, not the folder of a run"),
        top=(DATA, "is a file, not the folder of a run"),
        ls=(DATA, "there is no checkpoint of Paceline"),
        check=(DATA, "there is no checkpoint of Paceline"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_command_tells_what_is_there(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    case, folder = CASES[name], tmp_path / "run"
    case.make(folder)
    commands = {
        "report": ["report", str(folder), "--md"],
        "top": ["top", str(folder), "--once"],
        "ls": ["ckpt", "ls", str(folder)],
        "check": ["ckpt", "check", str(folder)],
    }
    for command, words in commands.items():
        code, sentence = getattr(case, command)
        assert main(words) == code, command
        printed = capsys.readouterr()
        # The message of an error goes to standard error, and what was found to standard output.
        found = printed.err if code == DATA and not printed.out else printed.out
        assert sentence in " ".join(found.split("\n")), (command, printed)
        assert "Traceback" not in printed.err


def test_a_checkpoint_of_many_ranks_is_shown_on_a_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _whole(tmp_path, ranks=4096)
    assert main(["ckpt", "show", str(tmp_path)]) == OK
    lines = capsys.readouterr().out.splitlines()
    assert "  4,096 files, rank-0.bin to rank-4095.bin: 16,384 bytes" in lines
    assert len(lines) < 20
