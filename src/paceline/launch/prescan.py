"""What is known before torch is imported: how many ranks to start, and whether there is a script.

torch's own parser (options.py) reads the options later. If the number of ranks found here is wrong, the
launcher starts the ranks again.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence

from paceline.command_line import nearest_file
from paceline.errors import ConfigError

# What other launchers call --nproc-per-node.
NPROC_ALIASES = ("-n", "--nproc", "--nprocs", "--num-processes", "--num_processes")

# With these options and variables ranks are not started early: they change the start or the output of ranks.
_NO_EARLY_START = (
    *("-h", "--help", "--no-python", "--run-path", "--numa-binding"),
    *("-r", "--redirects", "-t", "--tee", "--logs-specs", "--start-method"),
)
_NO_EARLY_START_VARIABLES = tuple(
    f"PET_{name}" for name in ("NO_PYTHON", "RUN_PATH", "REDIRECTS", "TEE")
)


class ScriptError(Exception):
    """A script that is not valid Python; the text is what Python would print."""


def early_count(argv: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """How many ranks to start before torch reads the options; None if ranks must not be started yet."""
    if not argv or any(name in environment for name in _NO_EARLY_START_VARIABLES):
        return None
    count = environment.get("PET_NPROC_PER_NODE", "1")
    words = iter(argv)
    for word in words:
        if word.endswith(".py") or word in ("-m", "--module"):
            break  # the script's own options follow
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name in _NO_EARLY_START:
            return None
        if name == "--nproc-per-node" or name in NPROC_ALIASES:
            count = value if equals else next(words, "")
    return int(count) if count.isascii() and count.isdigit() and int(count) > 0 else None


def check_script(script: str, *, module: bool) -> None:
    """Find errors that would stop every rank at once, before any script begins.

    Raises:
        ConfigError: there is no such script or module.
        ScriptError: it is not valid Python.
    """
    if module:
        _check_module(script)
        return
    if not os.path.exists(script):
        match = nearest_file(script)
        raise ConfigError(
            f"there is no script {script!r}.",
            where=f"seen from {os.getcwd()}",
            fix=f"did you mean {match!r}?"
            if match
            else "paceline's options come before the script, its own after it.",
        )
    if os.path.isdir(script):
        if not os.path.exists(os.path.join(script, "__main__.py")):
            raise ConfigError(
                f"{script!r} is a directory without a __main__.py.", fix="name the script in it."
            )
        return
    if script.endswith(".ipynb"):
        raise ConfigError(
            f"{script!r} is a notebook.", fix="jupyter nbconvert --to script makes a script of it."
        )
    if not os.path.isfile(script):
        return  # if it is a pipe, reading it here would leave nothing for the rank
    try:
        with open(script, "rb") as file:
            source = file.read()
    except OSError as error:
        raise ConfigError(f"the script {script!r} cannot be read: {error.strerror}.") from error
    if source[:4] != b"PK\x03\x04":
        _compile(source, script)


def _compile(source: bytes, script: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks show them
            compile(source, os.path.abspath(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise ScriptError("".join(traceback.format_exception_only(error))) from error


def _check_module(module: str) -> None:
    # Only the top-level package: finding a submodule would import its parents into this process.
    top = module.partition(".")[0]
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(top) if top else None
    except (ImportError, ValueError):
        found = None
    finally:
        sys.path.remove(os.getcwd())
    if found is None:
        raise ConfigError(
            f"there is no module {module!r}.",
            where=f"seen from {os.getcwd()}",
            fix="-m takes the name of a module; leave it out for a file.",
        )
