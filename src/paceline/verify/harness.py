"""Installs the recording in a rank, before the user's script starts.

The variable `PACELINE_BEFORE` names this module, and the launcher's worker calls `install`. Global hooks of
torch are used where they exist. Other functions (loaders, collectives, clipping, loading) are replaced by
recording ones before the script imports them. No hook is removed: a rank runs one script and ends.
"""

from __future__ import annotations

import os

from paceline.audit import record_collectives, record_data, record_loop, record_process
from paceline.audit.models import Models
from paceline.audit.progress import Progress
from paceline.audit.record import Recorder
from paceline.audit.run_plan import RunPlan
from paceline.verify import record_paceline


def install(control: object) -> None:
    """Install all hooks in this rank. `control`: its connection to its launcher."""
    plan = RunPlan.from_environment()
    rank = int(os.environ["RANK"])
    progress = Progress(plan, Recorder(plan.folder, rank), rank)
    models = Models(progress.recorder)
    record_process.install(progress, models, control)
    record_loop.install(progress, models)
    record_data.install(progress)
    record_collectives.install(progress)
    record_paceline.install(progress)
