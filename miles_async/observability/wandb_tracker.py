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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import psutil
import stamina
import structlog

from miles_async.arguments.observability import ObservabilityArguments, WandbMode
from miles_async.observability.background import BackgroundTracker
from miles_async.observability.tracker_parts import TrackedRun, earlier_run_id, mode_of, save_run_id
from miles_async.runtime.texts import shortened
from miles_async.samples.columns import SampleSummary
from miles_async.samples.files import SamplesFile
from miles_async.samples.reader import read_summaries, samples_files

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
    *("prompt_id", "sample", "reward", "advantage", "finish_reason", "age", "length"),
    *("prompt", "response", "label"),
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


class WandbTracker:
    """The Tracker itself, synchronous. Use :func:`open_wandb`, which keeps it off the training's thread."""

    def __init__(
        self, run: TrackedRun, mode: WandbMode, run_id: str, *, resume: bool = False, machine: str | None = None
    ) -> None:
        """Open the run, offline if it cannot be online. Raises wandb's errors if not even that works.

        ``resume``: online, continue the run with this id, if there is one. ``machine``: label of a secondary, unique
        per writer; None: the primary, of which a run has one.
        """
        import wandb  # takes a second, so only processes that log to it import it

        directory, sample_steps = run.arguments.run_dir, run.arguments.wandb_sample_steps
        directory.mkdir(parents=True, exist_ok=True)
        shared = run.arguments.wandb_shared and mode == "online"
        try:
            self._run = _open(run, "shared" if shared else mode, run_id, resume=resume, machine=machine)
        except wandb.errors.Error as error:
            if mode == "offline" or machine is not None:  # a secondary by itself would be another run
                raise
            log.warning(
                "wandb cannot be used online; the run writes its files, and `wandb sync` sends them",
                directory=str(directory / "wandb"),
                error=str(error),
            )
            self._run = _open(run, "offline", new_run_id(), resume=False, machine=None)
        else:
            if machine is None:
                save_run_id(directory, NAME, self._run.id)
        # shared mode orders by arrival, so the step is a metric and every chart's x-axis
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._tables = SampleTables(directory, sample_steps) if sample_steps and machine is None else None

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
            shown = wandb.Table(columns=list(COLUMNS), data=table.rows)
            self._run.log({table.name: shown, "step": table.step})


def _open(
    run: TrackedRun, mode: WandbMode | Literal["shared"], run_id: str, *, resume: bool, machine: str | None
) -> wandb.Run:
    """Call ``wandb.init``. Communication errors are retried with exponential backoff; others raise."""
    import wandb

    settings = wandb.Settings(
        init_timeout=INIT_TIMEOUT,
        x_label=machine or "driver",
        x_primary=machine is None,
        x_update_finish_state=machine is None,  # a secondary that ends must not mark the run as finished
        console="off",  # capturing it would fight with the live display over stdout
        silent=True,
    )
    retrying = stamina.retry_context(
        on=wandb.errors.CommError, attempts=INIT_ATTEMPTS, timeout=None, wait_initial=1.0, wait_max=10.0
    )
    for attempt in retrying:
        again = attempt.num > 1 and mode != "shared"  # wandb's process holds the id of an attempt that failed
        if again and resume:
            wandb.teardown()  # another id would be another run
        with attempt:
            return wandb.init(
                dir=run.arguments.run_dir,
                mode=mode,
                project=run.arguments.wandb_project,
                group=run.arguments.wandb_group,
                name=os.environ.get("WANDB_NAME") or run.arguments.run_dir.name,
                id=new_run_id() if again and not resume else run_id,
                resume="allow" if resume and mode == "online" else None,
                config=dict(run.settings),
                settings=settings,
            )
    raise AssertionError("stamina returns or raises")


def open_wandb(
    run: TrackedRun, mode: WandbMode, run_id: str, *, resume: bool = False, machine: str | None = None
) -> BackgroundTracker:
    """Return a :class:`WandbTracker` at once; a W&B that is slow, absent or broken costs a warning."""
    ends = threading.Thread(target=_end_service, name="wandb-end", daemon=True)
    make = partial(WandbTracker, run, mode, run_id, resume=resume, machine=machine)
    return BackgroundTracker(NAME, make, abandon=ends.start)


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
    return open_wandb(TrackedRun(arguments=arguments), "online", arguments.wandb_run_id, machine=label)


def _is_shared(arguments: ObservabilityArguments) -> bool:
    return arguments.wandb_shared and wandb_mode(arguments) == "online"


class SampleTable(NamedTuple):
    """The samples of one step or evaluation."""

    name: str  # samples/train or samples/eval
    step: int
    rows: list[list[Cell]]  # by COLUMNS


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
            yield SampleTable(f"samples/{file.kind}", file.step, [*map(_row, rows)])


def _row(summary: SampleSummary) -> list[Cell]:
    cells = (getattr(summary, column) for column in COLUMNS)
    return [shortened(cell, MOST_CHARACTERS) if isinstance(cell, str) else cell for cell in cells]
