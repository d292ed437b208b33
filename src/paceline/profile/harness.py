"""Runs in each rank before the script: counts optimizer steps, and records some with torch's profiler.

The variable `PACELINE_BEFORE` names this module, and the launcher's worker calls `install`. Steps are those
of the optimizer that steps first, whoever calls it: a script's own loop, or `paceline.Training`.
"""

from __future__ import annotations

import atexit
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function

from paceline.shm.work_queue import WorkQueue

_VARIABLE = "PACELINE_PROFILE"


def environment(folder: Path, skip: int, steps: int) -> dict[str, str]:
    """The variables that make the ranks of `paceline run` record a profile into `folder`."""
    plan = json.dumps({"folder": str(folder), "skip": skip, "steps": steps})
    quiet = {} if "KINETO_LOG_LEVEL" in os.environ else {"KINETO_LOG_LEVEL": "6"}
    return {"PACELINE_BEFORE": "paceline.profile.harness", _VARIABLE: plan} | quiet


def install(_: object) -> None:
    """Record the steps that the launcher asked for."""
    plan = json.loads(os.environ.pop(_VARIABLE))
    recorder = Recorder(Path(plan["folder"]), plan["skip"], plan["steps"])
    register_optimizer_step_post_hook(recorder.on_step)
    atexit.register(recorder.finish)


class Recorder:
    """Records the steps after the first `skip` ones.

    Args:
        folder: For the trace and the totals of this rank.
        steps: How many.
    """

    def __init__(self, folder: Path, skip: int, steps: int) -> None:
        self._folder = folder
        self._skip = skip
        self._steps = steps
        self._done = 0
        self._optimizer: int | None = None  # id of the optimizer whose steps count
        self._profile: profile | None = None

    def on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Called by torch after each step of an optimizer."""
        self._optimizer = self._optimizer or id(optimizer)
        if id(optimizer) != self._optimizer:
            return
        self._done += 1
        if self._done == self._skip:
            self._start()
        elif self._done == self._skip + self._steps:
            self.finish()

    def _start(self) -> None:
        _name_collectives()
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def finish(self) -> None:
        """Stop, and write what was recorded. Also called at exit, if the script ends before that."""
        if self._profile is None:
            return
        recorder, self._profile = self._profile, None
        recorder.stop()
        steps = self._done - self._skip
        if not steps:
            return
        rank = int(os.environ["RANK"])
        recorder.export_chrome_trace(str(self._folder / f"trace-{rank}.json"))
        # Of operations of the host, with the time of the kernels that they have started.
        totals = [
            [
                event.key,
                event.self_cpu_time_total / 1e6,
                event.self_device_time_total / 1e6,
                event.count,
            ]
            for event in recorder.key_averages()
            if event.device_type == DeviceType.CPU
        ]
        facts = {"rank": rank, "steps": steps, "totals": totals}
        (self._folder / f"facts-{rank}.json").write_text(json.dumps(facts))


def _name_collectives() -> None:
    """Have collectives in shared memory appear in the trace, as those of Gloo and NCCL do."""
    submit = WorkQueue.submit

    def recorded(self: WorkQueue, collective: Any, *args: Any, **options: Any) -> Any:
        with record_function(f"shm:{getattr(collective, '__name__', 'collective')}"):
            return submit(self, collective, *args, **options)

    WorkQueue.submit = recorded  # type: ignore[method-assign]
