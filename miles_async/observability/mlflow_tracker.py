"""MLflow: a run on a tracking server, or in whatever store its URI names."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from itertools import batched

from miles_async.arguments.observability import ObservabilityArguments
from miles_async.errors import ConfigurationError
from miles_async.observability.tracker_parts import TrackedRun, flat_settings, save_run_id

URI_VARIABLE = "MLFLOW_TRACKING_URI"
_MOST_METRICS, _MOST_PARAMETERS = 1000, 100  # in one request


def tracking_uri(arguments: ObservabilityArguments, environment: Mapping[str, str] = os.environ) -> str:
    """Return the URI of the flags, else of MLFLOW_TRACKING_URI. Raises ConfigurationError without one: MLflow's own
    default is a database in the working directory, which needs packages that its client lacks.
    """
    if uri := arguments.mlflow_tracking_uri or environment.get(URI_VARIABLE):
        return uri
    raise ConfigurationError(
        f"--use-mlflow: expected --mlflow-tracking-uri or {URI_VARIABLE}, such as http://127.0.0.1:5000 of `mlflow "
        "server`"
    )


class MlflowTracker:
    """The Tracker itself, synchronous: a request per call. Use it behind a BackgroundTracker."""

    def __init__(self, run: TrackedRun, uri: str, continued: str | None) -> None:
        """Open the run. ``continued``: id of a run to continue; None for a new one.

        Raises MLflow's errors, after the retries of MLFLOW_HTTP_REQUEST_MAX_RETRIES.
        """
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a run makes no network requests by itself
        from mlflow.entities import Param  # takes two seconds
        from mlflow.tracking import MlflowClient

        arguments = run.arguments
        self._client = MlflowClient(tracking_uri=uri)
        if continued is not None:
            self._run_id = continued
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            experiment_name = arguments.mlflow_experiment_name
            found = self._client.get_experiment_by_name(experiment_name)
            experiment = self._client.create_experiment(experiment_name) if found is None else found.experiment_id
            name = arguments.mlflow_run_name or arguments.run_dir.name
            self._run_id = self._client.create_run(experiment, run_name=name).info.run_id
            parameters = [Param(name, value) for name, value in flat_settings(run.settings).items()]
            for some in batched(parameters, _MOST_PARAMETERS):
                self._client.log_batch(self._run_id, params=some)
        save_run_id(arguments.run_dir, "mlflow", self._run_id)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = [Metric(mlflow_name(name), float(value), now, step) for name, value in metrics.items()]
        for some in batched(values, _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=some)

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)


def mlflow_name(metric: str) -> str:
    """The name of a metric in MLflow, which allows fewer characters.

    >>> mlflow_name("eval/gsm8k/pass@4")
    'eval/gsm8k/pass_4'
    """
    return re.sub(r"[^\w./: -]", "_", metric, flags=re.ASCII)
