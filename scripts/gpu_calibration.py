"""Figures of a run by which ``miles-async plan --gpu report.json`` estimates others."""

from __future__ import annotations

import statistics
from pathlib import Path

from miles_async.arguments.model_files import read_config
from miles_async.arguments.parser import parse_arguments
from miles_async.commands.durations import job_of
from miles_async.commands.measured import measured
from miles_async.ledger.reader import open_ledger
from miles_async.observability.metrics_file import FILE_NAME, read_metrics
from miles_async.runtime.files.run_directory import CONFIG_FILE, LEDGER_FILE
from miles_async.simulation.distributions import median
from miles_async.simulation.estimates import GPUS, Measured, assumptions
from miles_async.train_data.work import model_work
from miles_async.types import JsonObject


def for_plan(run_dir: Path, gpu: str) -> JsonObject:
    """``gpu``: whose data sheet the shares refer to."""
    arguments = parse_arguments(["--config", str(run_dir / CONFIG_FILE)]).arguments
    work, seen = model_work(read_config(arguments.model.directory)), measured(run_dir)
    assert work is not None, "the model has all sizes"
    rows = [row for row in read_metrics(run_dir / FILE_NAME) if row.get("train/tokens")]
    with open_ledger(run_dir / LEDGER_FILE) as ledger:
        groups = list(ledger.generations())
    sequence = statistics.mean(row["train/tokens"] / row["train/sequences"] for row in rows)
    response = statistics.mean(length for _, lengths in groups for length in lengths)
    at_once = arguments.rollout.samples_per_rollout * arguments.staleness.lead // arguments.cluster.num_engines
    slots = min(arguments.rollout.rollout_concurrency_per_engine, at_once)
    job = job_of(arguments, work, round(sequence - response), slots)
    found = Measured(
        train_seconds=median(seen.train),
        sequence_tokens=sequence,
        token_seconds=statistics.median(seconds / max(lengths) for seconds, lengths in groups),
        context=sequence - response / 2,
        copy_seconds=seen.copy_seconds,
        pause_seconds=median(seen.publish),
    )
    return {
        "transport": arguments.weights.weight_transport,
        "weights": work.weights,
        "prompt_tokens": job.prompt_tokens,
        "response_tokens": round(response),
        "shares": assumptions(job, work, GPUS[gpu], found),
    }
