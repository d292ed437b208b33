"""Paceline: one model on many processes, exact, from one command.

Names are resolved when they are first used (PEP 562), so importing this package imports nothing else.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from paceline.checkpoint.manager import Checkpoints as Checkpoints
    from paceline.checkpoint.weights import load_weights as load_weights
    from paceline.data.batches import Batches as Batches
    from paceline.errors import CheckpointError as CheckpointError
    from paceline.errors import CollectiveTimeout as CollectiveTimeout
    from paceline.errors import ConfigError as ConfigError
    from paceline.errors import DataError as DataError
    from paceline.errors import LaunchFailed as LaunchFailed
    from paceline.errors import NonFinite as NonFinite
    from paceline.errors import PacelineError as PacelineError
    from paceline.errors import PeerFailed as PeerFailed
    from paceline.errors import RankDisagreement as RankDisagreement
    from paceline.errors import SaveFailed as SaveFailed
    from paceline.errors import StepError as StepError
    from paceline.job.collectives import agree as agree
    from paceline.job.collectives import gather as gather
    from paceline.job.collectives import on_rank0 as on_rank0
    from paceline.job.collectives import sum_over_ranks as sum_over_ranks
    from paceline.job.job import Job as Job
    from paceline.job.job import join as join
    from paceline.job.mesh import Mesh as Mesh
    from paceline.job.preemption import Preempted as Preempted
    from paceline.job.rpc import rpc as rpc
    from paceline.launch.spawning import spawn as spawn
    from paceline.metrics.csv_table import CSV as CSV
    from paceline.metrics.logger import Logger as Logger
    from paceline.metrics.mlflow import MLflow as MLflow
    from paceline.metrics.prometheus import Prometheus as Prometheus
    from paceline.metrics.step_loss import StepLoss as StepLoss
    from paceline.metrics.tensorboard import TensorBoard as TensorBoard
    from paceline.metrics.wandb import WandB as WandB
    from paceline.parallel.compression import PowerSGD as PowerSGD
    from paceline.parallel.ddp import ddp as ddp
    from paceline.parallel.diloco import diloco as diloco
    from paceline.parallel.fsdp import fsdp as fsdp
    from paceline.parallel.modules import unwrap as unwrap
    from paceline.parallel.pipeline import pipeline as pipeline
    from paceline.parallel.syncbn import sync_batchnorm as sync_batchnorm
    from paceline.parallel.tensor import tensor_parallel as tensor_parallel
    from paceline.training.callbacks import BestCheckpoint as BestCheckpoint
    from paceline.training.callbacks import Callback as Callback
    from paceline.training.callbacks import EarlyStopping as EarlyStopping
    from paceline.training.callbacks import LearningRateMonitor as LearningRateMonitor
    from paceline.training.evaluation import Evaluation as Evaluation
    from paceline.training.evaluation import evaluate as evaluate
    from paceline.training.evaluation import parts as parts
    from paceline.training.step import Step as Step
    from paceline.training.trainer import Fit as Fit
    from paceline.training.trainer import Trainer as Trainer
    from paceline.training.trainer import Validation as Validation
    from paceline.training.training import Training as Training

_HOMES = {
    "agree": "paceline.job.collectives",
    "Batches": "paceline.data.batches",
    "BestCheckpoint": "paceline.training.callbacks",
    "Callback": "paceline.training.callbacks",
    "CheckpointError": "paceline.errors",
    "Checkpoints": "paceline.checkpoint.manager",
    "CollectiveTimeout": "paceline.errors",
    "ConfigError": "paceline.errors",
    "CSV": "paceline.metrics.csv_table",
    "DataError": "paceline.errors",
    "ddp": "paceline.parallel.ddp",
    "diloco": "paceline.parallel.diloco",
    "EarlyStopping": "paceline.training.callbacks",
    "evaluate": "paceline.training.evaluation",
    "Evaluation": "paceline.training.evaluation",
    "Fit": "paceline.training.trainer",
    "fsdp": "paceline.parallel.fsdp",
    "gather": "paceline.job.collectives",
    "Job": "paceline.job.job",
    "join": "paceline.job.job",
    "LaunchFailed": "paceline.errors",
    "LearningRateMonitor": "paceline.training.callbacks",
    "load_weights": "paceline.checkpoint.weights",
    "Logger": "paceline.metrics.logger",
    "Mesh": "paceline.job.mesh",
    "MLflow": "paceline.metrics.mlflow",
    "NonFinite": "paceline.errors",
    "on_rank0": "paceline.job.collectives",
    "PacelineError": "paceline.errors",
    "parts": "paceline.training.evaluation",
    "PeerFailed": "paceline.errors",
    "pipeline": "paceline.parallel.pipeline",
    "PowerSGD": "paceline.parallel.compression",
    "Preempted": "paceline.job.preemption",
    "RankDisagreement": "paceline.errors",
    "rpc": "paceline.job.rpc",
    "SaveFailed": "paceline.errors",
    "spawn": "paceline.launch.spawning",
    "Step": "paceline.training.step",
    "StepError": "paceline.errors",
    "StepLoss": "paceline.metrics.step_loss",
    "sum_over_ranks": "paceline.job.collectives",
    "sync_batchnorm": "paceline.parallel.syncbn",
    "tensor_parallel": "paceline.parallel.tensor",
    "TensorBoard": "paceline.metrics.tensorboard",
    "Trainer": "paceline.training.trainer",
    "Training": "paceline.training.training",
    "unwrap": "paceline.parallel.modules",
    "Validation": "paceline.training.trainer",
    "Prometheus": "paceline.metrics.prometheus",
    "WandB": "paceline.metrics.wandb",
}

__all__ = sorted([*_HOMES, "__version__"])  # noqa: PLE0605 - the one list of names is _HOMES


def __getattr__(name: str) -> Any:
    # A rank of `paceline run` has some modules already, loaded before its script imported this package.
    if (module := sys.modules.get(f"{__name__}.{name}")) is not None:
        return module
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    from importlib import import_module

    # No module has the name of a public name: importing it would put the module in its place.
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
