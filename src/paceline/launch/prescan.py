"""Whether there is a script, and whether it is valid Python."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
import warnings

from paceline.command_line import nearest_file
from paceline.errors import ConfigError


class ScriptError(Exception):
    """A script that is not valid Python; the text is what Python would print."""


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
