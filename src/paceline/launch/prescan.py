"""What can be known before torch is imported: is there a script, and how many ranks to start.

Reads torchrun's options just far enough to start the ranks' interpreters early. What it is not sure of
is left to torch's own parser (options.py); it is never a second parser of the rest.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError

_FLAGS = frozenset(
    {"--standalone", "-m", "--module", "--virtual-local-rank", "--virtual_local_rank"}
)
# Options that change how ranks are started or where their output goes.
_LATE = frozenset(
    {"-h", "--help", "--no-python", "--no_python", "--run-path", "--run_path", "--numa-binding"}
    | {"--numa_binding", "--log-dir", "--log_dir", "-r", "--redirects", "-t", "--tee"}
    | {"--logs-specs", "--logs_specs", "--start-method", "--start_method"}
)
_NPROC = frozenset({"--nproc-per-node", "--nproc_per_node"})
_VALUES = frozenset(
    {"--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--max-restarts"}
    | {"--monitor-interval", "--event-log-handler", "--role", "--local-ranks-filter", "--node-rank"}
    | {
        "--master-addr",
        "--master-port",
        "--local-addr",
        "--signals-to-handle",
        "--shutdown-timeout",
        "--hang-after",
        "--on-hang",
    }
)
_LATE_VARIABLES = ("PET_NO_PYTHON", "PET_RUN_PATH", "PET_LOG_DIR", "PET_REDIRECTS", "PET_TEE")


class ScriptError(Exception):
    """A script that no interpreter could run; the text is what Python would print."""


@dataclass(frozen=True)
class Early:
    """What an early start is sure of.

    Args:
        nproc: Ranks on this node.
        script: A file, or the name of a module.
        module: Whether it is a module.
    """

    nproc: int
    script: str
    module: bool


def scan(argv: Sequence[str], environment: Mapping[str, str]) -> Early | None:
    """Find what an early start needs in torchrun's options; None where it is not sure."""
    if any(name in environment for name in _LATE_VARIABLES):
        return None
    nproc = environment.get("PET_NPROC_PER_NODE", "1")
    module = environment.get("PET_MODULE", "0") == "1"
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            return Early(int(nproc), word, module) if _is_count(nproc) else None
        if name in _LATE or word == "--":
            return None
        if word in _FLAGS:
            module = module or word in ("-m", "--module")
        elif name in _NPROC or name.replace("_", "-") in _VALUES:
            given = value if equals else next(words, "")
            nproc = given if name in _NPROC else nproc
        else:
            return None  # an abbreviation, or an option of a newer torch
    return None


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) > 0


def check_script(script: str, *, module: bool) -> None:
    """Find what would stop every rank at once, before there are any.

    Raises:
        ConfigError: there is no such script or module.
        ScriptError: it is not valid Python.
    """
    if module:
        _check_module(script)
        return
    if not os.path.exists(script):
        raise ConfigError(
            f"there is no script {script!r}.",
            where=f"seen from {os.getcwd()}",
            fix="paceline's options come before the script, its own after it.",
        )
    if os.path.isdir(script):
        if not os.path.exists(os.path.join(script, "__main__.py")):
            raise ConfigError(
                f"{script!r} is a directory without a __main__.py.", fix="name the script in it."
            )
        return
    if not os.path.isfile(script):
        return  # reading from a pipe would take it away from the rank
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
            warnings.simplefilter("ignore")  # the ranks will show them
            compile(source, os.path.abspath(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise ScriptError("".join(traceback.format_exception_only(error))) from error


def _check_module(module: str) -> None:
    # The top alone: finding a submodule would import its parents in here.
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
            fix="-m takes a module's name; leave it out for a file.",
        )
