"""Weights & Biases. A run whose server cannot be used goes offline: files in the run directory (`wandb sync` sends).

The driver logs for all processes, which is the only way offline. Online, several processes may log to one run
(``--wandb-shared``): the driver is its primary, and logs all metrics; secondaries add what W&B measures of their
machines, each under its own label.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil
import stamina
import structlog

from miles_async.arguments.observability import ObservabilityArguments, WandbMode
from miles_async.observability.background import BackgroundTracker
from miles_async.observability.tracker_parts import earlier_run_id, mode_of, save_run_id
from miles_async.runtime.texts import shortened
from miles_async.samples.columns import SampleSummary
from miles_async.samples.files import SamplesFile
from miles_async.samples.reader import read_summaries, samples_files
from miles_async.types import JsonObject

if TYPE_CHECKING:
    import wandb

log = structlog.get_logger(__name__)

INIT_TIMEOUT = 300.0  # seconds; wandb's own 90 s are too few when many jobs start at once on a cluster
INIT_ATTEMPTS = 3
NAME = "wandb"
SERVICE = "wandb-core"  # wandb's process
END_SECONDS = 5.0  # that it may take to end after a run, if the tracker did not finish
_ALIASES: Mapping[str, WandbMode] = {"run": "online", "shared": "online", "dryrun": "offline"}  # wandb's other names

COLUMNS = (
    "prompt_id",
    "sample",
    "reward",
    "advantage",
    "finish_reason",
    "age",
    "length",
    "prompt",
    "response",
    "label",
)
"""Fields of SampleSummary, in the order of the tables of samples."""

MOST_ROWS = 64
MOST_CHARACTERS = 20_000  # of a cell; a longer one loses its middle

Cell = str | float | int | None


def wandb_mode(arguments: ObservabilityArguments, environment: Mapping[str, str] = os.environ) -> WandbMode:
    """Return the mode of the flags, else of WANDB_MODE, else online. Raises ConfigurationError."""
    if not arguments.use_wandb:
        return "disabled"
    return mode_of(arguments.wandb_mode, "WANDB_MODE", environment, _ALIASES)


def login_problem() -> str | None:
    """Why wandb cannot log in; None if it has a key, which its server may still refuse. Contacts no server."""
    import wandb

    wandb.setup(wandb.Settings(mode="online"))  # else WANDB_MODE=offline next to --wandb-mode online has no key
    try:
        return None if wandb.login(prompt=False, verify=False) else "there is no API key"
    except wandb.errors.Error as error:
        return str(error)


def new_run_id() -> str:
    """Make the id that all writers of one run share."""
    return uuid.uuid4().hex[:12]


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbOptions:
    """Options of ``wandb.init``."""

    directory: Path  # files go to <directory>/wandb
    mode: WandbMode = "offline"
    project: str = "miles_async"
    group: str | None = None
    config: JsonObject = field(default_factory=dict)
    run_id: str = field(default_factory=new_run_id)
    resume: bool = False  # online: continue the run with this id, if there is one
    sample_steps: int = 0  # log a table of samples every so many steps; 0: none
    shared: bool = False  # online only: several writers log to this run, with one run_id
    label: str = "driver"  # unique per writer
    primary: bool = True  # exactly one writer is primary
    init_timeout: float = INIT_TIMEOUT


class WandbTracker:
    """The Tracker itself, synchronous. Use :func:`open_wandb`, which keeps it off the training's thread."""

    def __init__(self, options: WandbOptions) -> None:
        """Open the run, offline if it cannot be online. Raises wandb's errors if not even that works."""
        import wandb  # takes a second, so only processes that log to it import it

        options.directory.mkdir(parents=True, exist_ok=True)
        mode: WandbMode | Literal["shared"] = "shared" if options.shared and options.mode == "online" else options.mode
        try:
            self._run = _open(options, mode)
        except wandb.errors.Error as error:
            if mode == "offline" or not options.primary:  # a secondary by itself would be another run
                raise
            log.warning(
                "wandb cannot be used online; the run writes its files, and `wandb sync` sends them",
                directory=str(options.directory / "wandb"),
                error=str(error),
            )
            self._run = _open(replace(options, run_id=new_run_id(), resume=False), "offline")
        else:
            if options.primary:
                save_run_id(options.directory, NAME, self._run.id)
        # shared mode orders by arrival, so the step is a metric and every chart's x-axis
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._tables = SampleTables(options.directory, options.sample_steps) if options.sample_steps else None

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Log the metrics of a step, and the tables of samples that are on disk by now."""
        self._run.log({**metrics, "step": step})
        self._log_tables()

    def finish(self) -> None:
        """Log the tables that are left, and wait until W&B has everything."""
        try:
            self._log_tables()
        finally:
            self._run.finish()

    def _log_tables(self) -> None:
        import wandb

        for table in self._tables.new() if self._tables is not None else ():
            shown = wandb.Table(columns=list(COLUMNS), data=[list(row) for row in table.rows])
            self._run.log({table.name: shown, "step": table.step})


def _open(options: WandbOptions, mode: WandbMode | Literal["shared"]) -> wandb.Run:
    """Call ``wandb.init``. Communication errors are retried with exponential backoff; others raise."""
    import wandb

    settings = wandb.Settings(
        init_timeout=options.init_timeout,
        x_label=options.label,
        x_primary=options.primary,
        x_update_finish_state=options.primary,  # a secondary that ends must not mark the run as finished
        console="off",  # capturing it would fight with the live display over stdout
        silent=True,
    )
    retrying = stamina.retry_context(
        on=wandb.errors.CommError, attempts=INIT_ATTEMPTS, timeout=None, wait_initial=1.0, wait_max=10.0
    )
    for attempt in retrying:
        again = attempt.num > 1 and mode != "shared"  # wandb's process holds the id of an attempt that failed
        if again and options.resume:
            wandb.teardown()  # another id would be another run
        with attempt:
            return wandb.init(
                dir=options.directory,
                mode=mode,
                project=options.project,
                group=options.group,
                name=os.environ.get("WANDB_NAME") or options.directory.name,
                id=new_run_id() if again and not options.resume else options.run_id,
                resume="allow" if options.resume and mode == "online" else None,
                config=dict(options.config),
                settings=settings,
            )
    raise AssertionError("stamina returns or raises")


def open_wandb(options: WandbOptions) -> BackgroundTracker:
    """Return a tracker at once; a W&B that is slow, absent or broken costs a warning."""
    ends = threading.Thread(target=_end_service, name="wandb-end", daemon=True)
    return BackgroundTracker(NAME, lambda: WandbTracker(options), abandon=ends.start)


def _end_service() -> None:
    """End wandb's process soon after the main thread, which would wait for it: for minutes, if W&B is silent."""
    threading.main_thread().join()
    time.sleep(END_SECONDS)
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            if process.name() == SERVICE:
                process.kill()


def with_shared_id(arguments: ObservabilityArguments) -> ObservabilityArguments:
    """Choose the id of the run before its processes start, if they share it. Raises ConfigurationError."""
    if not _is_shared(arguments) or arguments.wandb_run_id is not None:
        return arguments
    return replace(arguments, wandb_run_id=earlier_run_id(NAME) or new_run_id())


def report_machine(arguments: ObservabilityArguments, label: str) -> BackgroundTracker | None:
    """Let W&B measure this machine until the process ends; None if the run is not shared.

    ``label``: no other process of the run has it.
    """
    if not _is_shared(arguments) or arguments.wandb_run_id is None:
        return None
    return open_wandb(
        WandbOptions(
            directory=arguments.run_dir,
            mode="online",
            project=arguments.wandb_project,
            group=arguments.wandb_group,
            run_id=arguments.wandb_run_id,
            shared=True,
            label=label,
            primary=False,
        )
    )


def _is_shared(arguments: ObservabilityArguments) -> bool:
    return arguments.wandb_shared and wandb_mode(arguments) == "online"


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTable:
    """The samples of one step or evaluation."""

    name: str  # samples/train or samples/eval
    step: int
    rows: tuple[tuple[Cell, ...], ...]  # by COLUMNS


class SampleTables:
    """Tables that were not logged yet: of every ``every``-th step, and of all evaluations."""

    def __init__(self, run_dir: Path, every: int) -> None:
        self._run_dir = run_dir
        self._every = every
        self._taken: set[SamplesFile] = set()

    def new(self) -> Iterator[SampleTable]:
        """Yield the new tables whose files are complete. Raises DataError for one that cannot be read, and does not
        try that one again.
        """
        for file in samples_files(self._run_dir):
            if file in self._taken or (file.kind == "train" and file.step % self._every):
                continue
            self._taken.add(file)
            rows = read_summaries(file.path)[:MOST_ROWS]
            yield SampleTable(name=f"samples/{file.kind}", step=file.step, rows=tuple(map(_row, rows)))


def _row(summary: SampleSummary) -> tuple[Cell, ...]:
    cells = (getattr(summary, column) for column in COLUMNS)
    return tuple(shortened(cell, MOST_CHARACTERS) if isinstance(cell, str) else cell for cell in cells)
