"""Whether there is a script."""

from __future__ import annotations

import os

from paceline.command_line import nearest_file
from paceline.errors import ConfigError


def check_script(script: str) -> None:
    """Refuse a path that cannot be a script, before any rank starts.

    Raises:
        ConfigError: there is no such script, or it is a notebook.
    """
    if not os.path.exists(script):
        match = nearest_file(script)
        raise ConfigError(
            f"there is no script {script!r}.",
            where=f"seen from {os.getcwd()}",
            fix=f"did you mean {match!r}?"
            if match
            else "paceline's options come before the script, its own after it.",
        )
    if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise ConfigError(
            f"{script!r} is a directory without a __main__.py.", fix="name the script in it."
        )
    if script.endswith(".ipynb"):
        raise ConfigError(
            f"{script!r} is a notebook.", fix="jupyter nbconvert --to script makes a script of it."
        )
