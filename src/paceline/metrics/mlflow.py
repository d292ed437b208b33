"""Metrics for MLflow. A front to the package `mlflow` (or `mlflow-skinny`)."""

from __future__ import annotations

import time
from typing import Any

from paceline.metrics.logger import Values, require


class MLflow:
    """Logs to a run of MLflow, which starts on rank 0 with the first values.

    Args:
        experiment: Name of the experiment; it is made if it does not exist.
        tracking_uri: A server, a folder or a database; None is the one that MLflow is set to.
        run_id: A run to continue; None starts a new one.
        run_name: Name of a new run.
        parameters: Written with the first values. MLflow refuses other values for a run that has them.

    Raises:
        ConfigError: MLflow is not installed.

    Collective: none.
    """

    def __init__(
        self,
        experiment: str = "Default",
        *,
        tracking_uri: str | None = None,
        run_id: str | None = None,
        run_name: str | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        require("mlflow", extra="mlflow")
        self._experiment = experiment
        self._tracking_uri = tracking_uri
        self._run_id = run_id
        self._run_name = run_name
        self._parameters = parameters or {}
        self._client: Any = None
        self._status = "FINISHED"

    def log(self, step: int, values: Values) -> None:
        """Log the values of a step."""
        if self._client is None:
            self._start()
        import mlflow

        now = round(1000 * time.time())
        metrics = [
            mlflow.entities.Metric(name, float(value), now, step) for name, value in values.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def fail(self) -> None:
        """Let `close` give the run the status FAILED."""
        self._status = "FAILED"

    def close(self) -> None:
        """Finish the run."""
        if self._client is not None:
            self._client.set_terminated(self._run_id, self._status)

    def _start(self) -> None:
        import mlflow

        client = mlflow.MlflowClient(self._tracking_uri)
        if self._run_id is None:
            found = client.get_experiment_by_name(self._experiment)
            experiment = (
                client.create_experiment(self._experiment) if found is None else found.experiment_id
            )
            run = client.create_run(experiment, run_name=self._run_name)
            self._run_id = run.info.run_id
        self._client = client  # `close` ends the run, also if a parameter is refused
        for name, value in self._parameters.items():
            client.log_param(self._run_id, name, value)
