"""`paceline.join` in the workers of Ray Train's `TorchTrainer`: the same weights, errors, and restarts."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import environment, finish, start

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed: pip install 'ray[train]'", allow_module_level=True)

PROGRAM = """
import json, os, sys
import torch
from torch import nn
import paceline
from paceline.testing import digest

def train(config):
    with paceline.join(seed=1) as job:
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        data = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
        torch.manual_seed(0)
        model = paceline.ddp(job, nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batches = paceline.Batches(job, data, global_batch=16, micro_batch=4)
        checkpoints = None
        if config.get("checkpoints"):
            checkpoints = paceline.Checkpoints(config["checkpoints"], every_steps=2)
        training = paceline.Training(
            job, model, optimizer, batches, reproducible=True, checkpoints=checkpoints
        )
        if config.get("run"):
            training.report(config["run"])
        for step in training.steps(until=config.get("until", 12)):
            for x, y in step:
                loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
                step.backward(loss, count=len(y), reduction="sum")
            step.update()
            if config.get("error") == step.number and job.rank == 1:
                raise ValueError("sample 17 is damaged")
            if config.get("kill") == step.number and job.rank == 1:
                if not os.path.exists(config["killed"]):
                    open(config["killed"], "w").close()
                    os._exit(3)
        found = [job.launcher, job.world_size, digest(paceline.unwrap(model).state_dict())]
    with paceline.join(seed=2) as job:
        found.append([job.launcher, job.world_size])
    if "out" in config:
        with open(f"{config['out']}-{job.rank}", "w") as file:
            json.dump(found, file)

if __name__ == "__main__":
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    folder = sys.argv[1]
    if sys.argv[2:] == ["alone"]:
        train({"out": f"{folder}/alone"})
        sys.exit()

    def fit(workers=2, **config):
        trainer = TorchTrainer(
            train,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(
                storage_path=f"{folder}/ray",
                failure_config=FailureConfig(max_failures=int("kill" in config)),
            ),
        )
        trainer.fit()

    ray.init(num_cpus=2, include_dashboard=False)
    fit(out=f"{folder}/straight")
    run = f"{folder}/run"
    fit(workers=1, checkpoints=run, run=run, until=5)
    fit(
        out=f"{folder}/restarted",
        checkpoints=run,
        run=run,
        kill=7,
        killed=f"{folder}/killed",
    )
    try:
        fit(error=3)
    except Exception as error:
        with open(f"{folder}/error", "w") as file:
            file.write(str(error))
    ray.shutdown()
"""


def _run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "train.py", str(folder), *more],
        cwd=folder,
        env=environment() | {"RAY_TRAIN_V2_ENABLED": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def _read(folder: Path, name: str) -> list[Any]:
    return [json.loads((folder / f"{name}-{rank}").read_text()) for rank in range(2)]


@pytest.mark.timeout(450)  # above the deadlines of its four commands
def test_workers_of_ray_train_are_the_ranks_of_a_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    done = _run(tmp_path)
    straight = _read(tmp_path, "straight")
    assert straight[0] == straight[1]
    assert straight[0][:2] == ["ray", 2]
    assert straight[0][3] == ["ray", 2]  # of the second job of the same workers
    _run(tmp_path, "alone")
    alone = json.loads((tmp_path / "alone-0").read_text())
    assert straight[0][2] == alone[2]  # bit-equal to one process

    # A run of one worker goes on with two. Then Ray starts these again, from their own checkpoint.
    assert (tmp_path / "killed").exists()
    assert _read(tmp_path, "restarted") == straight
    assert "resumed after step 5 " in done.stdout + done.stderr
    assert "resumed after step 6 " in done.stdout + done.stderr
    top = finish(start(["top", "run", "--once"], tmp_path))
    assert "step 12/12" in top.out
    assert "rank 1 " in top.out
    report = finish(start(["report", "run", "--md"], tmp_path))
    assert "| steps | 12 of 12 |" in report.out
    assert "| starts | 3 |" in report.out

    error = (tmp_path / "error").read_text()
    assert "ValueError: sample 17 is damaged" in error
    assert "PeerFailed: rank 1 failed first: ValueError: sample 17 is damaged" in error
