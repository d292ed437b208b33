"""Watches a training of paceline's own: its steps, the samples in them, their losses and weights."""

from __future__ import annotations

from paceline.verify.progress import Progress


def install(progress: Progress) -> None:
    """Watch every `Training`. Collective: none."""
