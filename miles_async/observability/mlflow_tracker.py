"""MLflow: a run on a tracking server, or in whatever store its URI names."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path

from miles_async.arguments.observability import ObservabilityArguments
from miles_async.errors import ConfigurationError
from miles_async.observability.tracker_parts import Settings, flat_settings, save_run_id

NAME = "mlflow"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class MlflowOptions:
    """Where to log."""

    run_dir: Path
    uri: str
    experiment: str
    run_name: str
    run_id: str | None = None  # of a run to continue; None: a new one
    settings: Settings = field(default_factory=dict)


class MlflowTracker:
    """The Tracker itself, synchronous: a request per call. Use it behind a BackgroundTracker."""

    def __init__(self, options: MlflowOptions, *, clock: Callable[[], float] = time.time) -> None:
        """Open the run. Raises MLflow's errors, after the retries of MLFLOW_HTTP_REQUEST_MAX_RETRIES."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a run makes no network requests by itself
        from mlflow.entities import Param  # takes two seconds
        from mlflow.tracking import MlflowClient

        self._clock = clock
        self._client = MlflowClient(tracking_uri=options.uri)
        if options.run_id is not None:
            self._run_id = options.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            experiment = self._experiment(options.experiment)
            self._run_id = self._client.create_run(experiment, run_name=options.run_name).info.run_id
            parameters = [Param(name, value) for name, value in flat_settings(options.settings).items()]
            for some in batched(parameters, _MOST_PARAMETERS):
                self._client.log_batch(self._run_id, params=some)
        save_run_id(options.run_dir, NAME, self._run_id)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Log the metrics of a step."""
        from mlflow.entities import Metric

        now = int(self._clock() * 1000)
        values = [Metric(mlflow_name(name), float(value), now, step) for name, value in metrics.items()]
        for some in batched(values, _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=some)

    def finish(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))


def mlflow_name(metric: str) -> str:
    """The name of a metric in MLflow, which allows fewer characters.

    >>> mlflow_name("eval/gsm8k/pass@4")
    'eval/gsm8k/pass_4'
    """
    return re.sub(r"[^\w./: -]", "_", metric, flags=re.ASCII)
