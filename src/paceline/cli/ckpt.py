"""`paceline ckpt`: list, show, check, export and remove checkpoints. Only `export` imports torch."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoint.manifest import Damaged
from paceline.checkpoint.store import Store, committed, open_store, read_manifest, remove, verify
from paceline.command_line import CommandParser, not_negative_count
from paceline.errors import CheckpointError, PacelineError, listed
from paceline.exit_codes import ExitCode

HELP = "list, show, check, export or remove checkpoints"
_ACTIONS = {
    "ls": "list the checkpoints of a folder",
    "show": "show what a checkpoint holds",
    "check": "compare every byte with its digest",
    "export": "write the weights for other programs",
    "rm": "remove a checkpoint",
}
_EXAMPLES = {
    "ls": {"paceline ckpt ls runs/a": "steps, sizes and times"},
    "show": {
        "paceline ckpt show runs/a --step 1200": "files, tensors and versions of one checkpoint"
    },
    "check": {
        "paceline ckpt check runs/a": "read all checkpoints, and report those that are damaged"
    },
    "export": {
        "paceline ckpt export runs/a model.safetensors": "the weights of the newest checkpoint",
        "paceline ckpt export --best runs/a model.pth": "those of the checkpoint that `ls` marks as best",
        "paceline ckpt export --safetensors --shards 5GB runs/a hub": "a folder as on the Hugging Face hub",
    },
    "rm": {"paceline ckpt rm runs/a --step 1200": "remove the checkpoint of step 1200"},
}
_EXIT_CODES: dict[ExitCode | str, str] = {
    ExitCode.OK: "done; with `check`: all checkpoints are whole",
    ExitCode.USAGE: "the command line is wrong",
    ExitCode.DATA: "there is no such checkpoint, it is damaged, or it cannot be read or written",
}
_SHOWN_FILES = 16  # of a checkpoint; each rank writes one
_FOREIGN = {".metadata": "torch.distributed.checkpoint's", "latest": "DeepSpeed's"}


def main(argv: Sequence[str]) -> int:
    """Run `paceline ckpt` with these arguments. Returns 0, or 65 if there is no whole checkpoint."""
    args = parser().parse_args(argv)
    actions = {"ls": _ls, "show": _show, "check": _check, "export": _export, "rm": _rm}
    try:
        return actions[args.action](_open(args.folder), args)
    except BrokenPipeError:  # the reader of the output has ended: cli/main.py
        raise
    except (Damaged, PacelineError, OSError) as error:
        print(f"paceline ckpt: {error}", file=sys.stderr)
        return ExitCode.DATA


def parser() -> CommandParser:
    """The options of `paceline ckpt`."""
    ours = CommandParser(
        "paceline ckpt",
        description=HELP[0].upper() + HELP[1:] + ".",
        examples={line: text for examples in _EXAMPLES.values() for line, text in examples.items()},
        exit_codes=_EXIT_CODES,
    )
    actions = ours.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in _ACTIONS.items():
        action = actions.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            examples=_EXAMPLES[name],
            exit_codes=_EXIT_CODES,
        )
        other = "; or weights in any form that load_weights reads" if name == "export" else ""
        action.add_argument(
            "folder", metavar="FOLDER", help=f"of a run or its checkpoints: a path or a URL{other}"
        )
        if name == "export":
            action.add_argument(
                "to",
                type=Path,
                metavar="TO",
                help="a file, .pth or .safetensors; or a new folder with --safetensors or --dcp",
            )
            form = action.add_mutually_exclusive_group()
            form.add_argument(
                "--safetensors",
                action="store_true",
                help="write a folder of safetensors files with an index, as on the Hugging Face hub",
            )
            form.add_argument(
                "--dcp",
                action="store_true",
                help="write a folder for torch.distributed.checkpoint.load, under the names of the model",
            )
            action.add_argument(
                "--shards",
                type=_size,
                metavar="SIZE",
                help="with --safetensors: size of a file at most (5GB)",
            )
            action.add_argument(
                "--model",
                type=not_negative_count,
                default=0,
                metavar="N",
                help="which model, if there are several (0)",
            )
        if name != "ls":
            default = {"check": "default: all", "rm": None}.get(name, "default: the newest")
            chosen: Any = action
            if name == "export":
                chosen = action.add_mutually_exclusive_group()
                chosen.add_argument(
                    "--best", action="store_true", help="the last one that was saved as the best"
                )
            chosen.add_argument(
                "--step", type=not_negative_count, required=name == "rm", metavar="N", help=default
            )
    return ours


def _size(text: str) -> int:
    """The type of an option: bytes, such as 5GB or 500MB."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"must be a size such as 5GB or 500MB, and is {text!r}")
    return int(match[1]) * int(1000 ** " KMGT".index(match[2] or " "))


def _open(folder: str) -> Store:
    """The store of a folder; for the folder of a run, that of its folder "checkpoints"."""
    store = open_store(folder)
    inner = open_store(f"{folder.rstrip('/')}/checkpoints")
    return inner if not committed(store) and committed(inner) else store


def _steps(store: Store, step: int | None) -> list[int]:
    """The chosen steps, at least one."""
    steps = committed(store)
    if not steps:
        names = store.names()
        whose = next((text for name, text in _FOREIGN.items() if name in names), "")
        raise CheckpointError(
            f"there is no checkpoint of Paceline in {store.root}.",
            why=f"the folder is {whose}." if whose else "" if names else "it is empty or missing.",
        )
    if step is not None and step not in steps:
        raise CheckpointError(
            f"there is no checkpoint of step {step} in {store.root}; there are {steps}."
        )
    return steps if step is None else [step]


def _ls(store: Store, args: argparse.Namespace) -> int:
    steps = _steps(store, None)
    print(f"{'step':>10}{'size MB':>12}{'ranks':>7}  saved")
    for step in steps:
        try:
            manifest = read_manifest(store, step)
        except (Damaged, CheckpointError) as error:
            print(f"{step:>10}  {str(error).splitlines()[0]}")
            continue
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_at))
        size, ranks = f"{manifest.size_bytes / 1e6:,.1f}", manifest.world_size
        print(f"{step:>10}{size:>12}{ranks:>7}  {saved}{'  best' if manifest.best else ''}")
    return ExitCode.OK


def _show(store: Store, args: argparse.Namespace) -> int:
    step = _steps(store, args.step)[-1]
    manifest = read_manifest(store, step)
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    print(f"step {step}, saved by {manifest.world_size} ranks with {versions}")
    files = list(manifest.files)
    if len(files) > _SHOWN_FILES:
        print(f"  {len(files):,} files, {files[0]} to {files[-1]}: {manifest.size_bytes:,} bytes")
    else:
        for name, size in manifest.files.items():
            print(f"  {name}: {size:,} bytes")
    for name, saved in manifest.tensors.items():
        print(f"  {name}: {saved.dtype} {list(saved.shape)}")
    for name, value in manifest.tree.items() if isinstance(manifest.tree, dict) else ():
        if not isinstance(value, dict | list) or name == "position":
            print(f"  {name}: {value}")
    return ExitCode.OK


def _check(store: Store, args: argparse.Namespace) -> int:
    bad = 0
    for step in _steps(store, args.step):
        try:
            done = verify(store, read_manifest(store, step))
        except (Damaged, CheckpointError, OSError) as error:
            bad += 1
            what = "damaged" if isinstance(error, Damaged) else "cannot be read"
            print(f"step {step}: {what}: {error}")
        else:
            print(f"step {step}: whole, {done:,} bytes")
    return ExitCode.DATA if bad else ExitCode.OK


def _best(store: Store, steps: Sequence[int]) -> int:
    """The last of the steps that was saved as the best."""
    for step in reversed(steps):
        with contextlib.suppress(Damaged):
            if read_manifest(store, step).best:
                return step
    raise CheckpointError(
        f"no checkpoint in {store.root} is marked as the best; there are {list(steps)}.",
        why="none was saved by `training.save(best=True)` or `BestCheckpoint`.",
        fix="choose one with --step.",
    )


def _export(store: Store, args: argparse.Namespace) -> int:
    from paceline.checkpoint.export import write_dcp, write_file, write_shards
    from paceline.checkpoint.weights import open_weights

    if args.shards and not args.safetensors:
        parser().error("--shards is an option of --safetensors")
    source = args.folder
    if committed(store):
        steps = _steps(store, args.step)
        step = _best(store, steps) if args.best else steps[-1]
        source = f"{store.root.rstrip('/')}/step-{step}"
    elif args.best or args.step is not None:
        raise CheckpointError(
            f"{source} is not a folder of checkpoints, from which --step and --best choose.",
            fix="leave them out, or give the folder of the checkpoints.",
        )
    weights = open_weights(source, args.model)
    if args.safetensors:
        write_shards(args.to, weights, args.shards or _size("5GB"))
        kind = "safetensors"
    elif args.dcp:
        write_dcp(args.to, weights)
        kind = "torch.distributed.checkpoint"
    else:
        kind = "safetensors" if args.to.suffix == ".safetensors" else "torch.save"
        values = {} if kind == "safetensors" else weights.values
        write_file(args.to, {**weights.read(), **values})
    what = source if weights.step is None else f"step {weights.step}"
    print(f"{what}: {len(weights.shapes)} tensors written to {args.to} (format of {kind})")
    if kind == "safetensors" and weights.values:
        print(f"not written, because safetensors holds tensors only: {listed([*weights.values])}")
    return ExitCode.OK


def _rm(store: Store, args: argparse.Namespace) -> int:
    step = _steps(store, args.step)[-1]
    remove(store, [step])
    print(f"step {step} removed")
    return ExitCode.OK
