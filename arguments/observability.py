"""Logs, metrics and trackers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles_async.arguments.flag import flag

WandbMode = Literal["online", "offline", "disabled"]
SwanlabMode = Literal["online", "offline", "disabled"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservabilityArguments:
    """Observability"""

    run_dir: Path = flag(Path("runs/latest"), "directory for logs, metrics.jsonl, summary.json and plots")
    record: bool = flag(
        False,
        "write every event and decision of the run, tokens included, into the run directory, for `miles-async replay`",
    )
    save_samples: int = flag(
        2,
        "write text and tokens of this many groups of every step, and of all evaluations, into the run directory, for "
        "`miles-async samples`; 0: none",
        metavar="GROUPS",
        at_least=0,
    )
    save_samples_gib: float = flag(
        2.0,
        "most that --save-samples may take on disk; at the limit every second step is removed, then every fourth is "
        "kept, and so on",
        metavar="GIB",
        needs=("save_samples",),
        above=0,
    )
    use_wandb: bool = flag(False, "log to Weights & Biases; the run has the name of the run directory")
    wandb_mode: WandbMode | None = flag(
        None,
        "offline: files in the run directory, no network (`wandb sync` sends them); none: WANDB_MODE, else online",
        needs=("use_wandb",),
    )
    wandb_project: str = flag("miles_async", "W&B project", needs=("use_wandb",))
    wandb_group: str | None = flag(None, "W&B group", needs=("use_wandb",))
    wandb_shared: bool = flag(
        False,
        "online: W&B measures the machine of every trainer node for the same run (its shared mode), not the driver's "
        "alone",
        needs=("use_wandb",),
    )
    wandb_run_id: str | None = flag(
        None,
        "continue the W&B run with this id, or begin one; none: a new run, and after a restart (--max-run-restarts) "
        "the one from before",
        metavar="ID",
        needs=("use_wandb",),
    )
    wandb_sample_steps: int = flag(
        0,
        "log a table of saved samples (prompts and answers) every this many steps and at evaluations; 0: never",
        metavar="STEPS",
        needs=("use_wandb",),
        at_least=0,
    )
    use_tensorboard: bool = flag(False, "log to TensorBoard: event files (the extra tensorboard)")
    tensorboard_dir: Path | None = flag(
        None,
        "directory of the event files; a run that resumes with the same one continues its curves; none: "
        "TENSORBOARD_DIR, else tensorboard/ in the run directory",
        metavar="DIR",
        needs=("use_tensorboard",),
    )
    use_prometheus: bool = flag(
        False, "serve the latest metrics at /metrics; Prometheus sends the key that MILES_ASYNC_METRICS_KEY has"
    )
    prometheus_port: int = flag(9464, "port of /metrics", at_least=1, at_most=65535, needs=("use_prometheus",))
    prometheus_run_name: str | None = flag(
        None, "label `run` of the metrics; none: the name of the run directory", needs=("use_prometheus",)
    )
    use_mlflow: bool = flag(False, "log to MLflow (the extra mlflow)")
    mlflow_tracking_uri: str | None = flag(
        None,
        "tracking server, such as http://127.0.0.1:5000; none: MLFLOW_TRACKING_URI",
        metavar="URI",
        needs=("use_mlflow",),
    )
    mlflow_experiment_name: str = flag("miles_async", "MLflow experiment", needs=("use_mlflow",))
    mlflow_run_name: str | None = flag(None, "name of the MLflow run; none: the run directory's", needs=("use_mlflow",))
    mlflow_run_id: str | None = flag(
        None,
        "continue the MLflow run with this id; none: a new run, and after a restart (--max-run-restarts) the one from "
        "before",
        metavar="ID",
        needs=("use_mlflow",),
    )
    use_trackio: bool = flag(False, "log to Trackio, on this machine unless it is given a Space (the extra trackio)")
    trackio_project: str = flag("miles_async", "Trackio project", needs=("use_trackio",))
    trackio_space_id: str | None = flag(
        None,
        "Hugging Face Space that shows the project to others; none: TRACKIO_SPACE_ID, else this machine alone",
        metavar="OWNER/NAME",
        needs=("use_trackio",),
    )
    use_swanlab: bool = flag(False, "log to SwanLab (the extra swanlab)")
    swanlab_mode: SwanlabMode | None = flag(
        None,
        "offline: files in the run directory, no network (`swanlab sync` sends them); none: SWANLAB_MODE, else online",
        needs=("use_swanlab",),
    )
    swanlab_project: str = flag("miles_async", "SwanLab project", needs=("use_swanlab",))
    swanlab_workspace: str | None = flag(None, "SwanLab workspace; none: the API key owner's", needs=("use_swanlab",))
    custom_tracker_path: str | None = flag(
        None, "module:attr of your own Tracker, which also receives all metrics", metavar="MODULE:ATTR"
    )
    progress: bool = flag(True, "live progress on a terminal (plain lines elsewhere)")
    log_level: LogLevel = flag("info", "least severe messages on the console")
    stall_timeout: float = flag(
        900.0, "seconds without any step or finished group after which the run stops", metavar="SECONDS", above=0
    )
