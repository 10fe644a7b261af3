"""``miles-async plan``: predict a run from its flags and the durations of its parts, and recommend settings."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich_argparse import RawDescriptionRichHelpFormatter

from miles_async.arguments.cluster import ClusterArguments
from miles_async.arguments.cluster_checks import check_engine_sizes, check_ranks
from miles_async.arguments.model_files import read_config
from miles_async.arguments.parser import parse_arguments
from miles_async.arguments.problems import refuse
from miles_async.arguments.server_groups import of_role, server_groups
from miles_async.arguments.staleness_checks import check_batch_order, check_staleness
from miles_async.arguments.surroundings import check_model_fits
from miles_async.arguments.validation import check_deadlines, range_problems
from miles_async.commands.durations import Timing, durations
from miles_async.commands.parser import CommandParser, at_least_one
from miles_async.commands.tables import printed
from miles_async.errors import ConfigurationError
from miles_async.runtime.device import with_precision
from miles_async.runtime.files.run_directory import CONFIG_FILE, check_directory
from miles_async.simulation.distributions import Fixed, longest, median, parse_distribution
from miles_async.simulation.estimates import GB, GPUS, Assumptions
from miles_async.simulation.plan import Refusal, Row, candidates, predict, recommend
from miles_async.simulation.plan_view import plan_table, plan_text, plot_plan
from miles_async.simulation.settings import SimulationSettings

TOKENS_PER_RESPONSE = 32  # of the median one: how finely time is divided
LONGEST_STEP = 86_400.0
"""Seconds that the trainer may take for a step: watchdogs look several times per second, so years would take hours."""

DESCRIPTION = """\
Predict step time, idle time, ages and waste for a sweep of settings, by simulating the real control loop, and
recommend the smallest age within 5 % of the fastest that throws away less than 2 % of the tokens, if one does.
Starts nothing, needs no model and no data.

--memory prints instead what trainer ranks and engines need of their GPUs; it needs config.json of --hf-checkpoint.

Flags of `miles-async train` (and @FILE, --config) describe the run; those below say how long its parts take.
SECONDS are a number, fixed:S, lognormal:MEDIAN:SIGMA[:LONGEST] or trace:FILE (one number per line)."""

EPILOG = """\
Examples:
  miles-async plan @run.args --latency lognormal:20:0.5 --train-seconds 60 --publish-seconds 2
  miles-async plan @run.args --memory --gpu-memory-gb 80
  miles-async plan @run.args --latency trace:latencies.txt --train-seconds 60 --publish-seconds 2 \\
      --sweep max-weight-staleness=1,2,4 --sweep rollout-num-gpus=4,6,8 --output plan.png
  miles-async plan @run.args --gpu h100 --response-tokens lognormal:6000:0.8:32768
  miles-async plan --from runs/latest --sweep rollout-num-gpus=4,8
"""


def plan(words: Sequence[str]) -> str:
    """Return the table and the recommendation. Raises ConfigurationError if no candidate can work."""
    if "--memory" in words:
        return _plan_memory([word for word in words if word != "--memory"])
    parser = _parser()
    own, train_words = parser.parse_known_args(list(words))
    if own.output is not None and own.output.suffix != ".png":
        parser.error(f"--output {own.output}: expected a name that ends with .png")
    if own.output is not None and not own.output.absolute().parent.is_dir():
        parser.error(f"--output {own.output}: there is no directory {own.output.absolute().parent}")
    if own.run_dir is not None:
        if own.gpu is not None:
            raise ConfigurationError("--from with --gpu: durations are measured, or estimated; give one of them")
        check_directory(own.run_dir)
        train_words = ["--config", str(own.run_dir / CONFIG_FILE), *train_words]
    base = parse_arguments(train_words, prog="miles-async plan").arguments
    base = replace(base, model=with_precision(base.model, base.cluster, for_gpus=own.gpu is not None))
    timing, slots, estimated = durations(own, base)
    labels = list(dict.fromkeys(candidates(own.sweep)))
    rows: list[Row] = []
    for row in predict(labels, lambda words: _settings([*train_words, *words], own, base.cluster, timing, slots)):
        rows.append(row)
        if sys.stderr.isatty():
            end = "\n" if len(rows) == len(labels) else ""
            print(f"\rsimulated {len(rows)} of {len(labels)}", end=end, file=sys.stderr, flush=True)
    recommended = recommend(rows)
    if recommended is None:
        refuse([f"{row.label}: {row.reason}" for row in rows if isinstance(row, Refusal)])
    text = estimated + printed(plan_table(rows, recommended)) + plan_text(rows, recommended)
    if own.output is not None:
        try:
            plot_plan(rows, recommended, own.output)
            text += f"wrote {own.output}\n"
        except OSError as error:  # the table is worth more than the picture
            text += f"--output {own.output}: {error}\n"
    return text


def _plan_memory(train_words: Sequence[str]) -> str:
    from miles_async.runs.memory import memory_report  # here, since it brings torch with it

    arguments = parse_arguments(train_words, prog="miles-async plan --memory").arguments
    arguments = replace(arguments, model=with_precision(arguments.model, arguments.cluster))
    refuse([*range_problems(arguments)])
    refuse([*check_ranks(arguments), *check_engine_sizes(arguments), *check_model_fits(arguments)])
    if arguments.model.hf_checkpoint is None or not read_config(arguments.model.hf_checkpoint):
        raise ConfigurationError("--memory needs --hf-checkpoint: a directory with config.json; weights are not read")
    return memory_report(arguments)


def _settings(
    words: Sequence[str], own: argparse.Namespace, base: ClusterArguments, timing: Timing, slots: int | None
) -> SimulationSettings:
    """One candidate. ``base``: the trainer ranks that ``timing`` is for; the candidate's ranks share the work."""
    arguments = parse_arguments(words, prog="miles-async plan").arguments
    problems = [*range_problems(arguments)]
    refuse(problems or [*check_staleness(arguments), *check_batch_order(arguments), *check_deadlines(arguments)])
    engines = sum(group.num_engines for group in of_role(server_groups(arguments), "train"))
    if arguments.engines.server_groups is None and engines < 1:
        raise ConfigurationError(
            f"--rollout-num-gpus {arguments.cluster.rollout_num_gpus} is less than --rollout-num-gpus-per-engine "
            f"{arguments.cluster.rollout_num_gpus_per_engine}: there would be no engine"
        )
    train = timing.train.scaled(base.trainer_world_size / arguments.cluster.trainer_world_size)
    if (step := longest(train)) > LONGEST_STEP:
        raise ConfigurationError(
            f"--train-seconds: expected steps of at most {LONGEST_STEP:g} s (a day), found one of {step:g} s"
        )
    return SimulationSettings(
        # The latencies alone determine response lengths; the unit of a token does not matter.
        rollout=replace(arguments.rollout, num_rollout=own.steps, rollout_max_response_len=1 << 40),
        staleness=arguments.staleness,
        weights=arguments.weights,
        engines=arguments.engines,
        num_engines=engines,
        slots_per_engine=slots,
        response_seconds=timing.response,
        environment_seconds=timing.environment,
        reward_seconds=timing.reward,
        token_seconds=max(1e-6, median(timing.response) / TOKENS_PER_RESPONSE),
        train_seconds=train,
        publish_seconds=timing.publish,
        copy_seconds=timing.copy_seconds,
        start_seconds=0.0,
        stall_timeout=arguments.observability.stall_timeout,
        seed=own.seed,
        trace=False,
    )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="miles-async plan",
        usage="miles-async plan [TRAIN FLAGS] --latency SECONDS --train-seconds SECONDS [--sweep FLAG=VALUE,...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=RawDescriptionRichHelpFormatter,
    )
    parser.add_argument(
        "--from", dest="run_dir", type=Path, metavar="RUN_DIR",
        help="take flags and durations from this run; flags on the command line override them",
    )  # fmt: skip
    parser.add_argument(
        "--latency", metavar="SECONDS",
        help="seconds to generate one response on its own slot: all turns, excluding the time between them",
    )  # fmt: skip
    parser.add_argument(
        "--environment-seconds",
        default="0",
        metavar="SECONDS",
        help="seconds a sample spends in its environment, in flight but not generating (default: 0)",
    )
    parser.add_argument(
        "--reward-seconds",
        default="0",
        metavar="SECONDS",
        help="seconds from the end of a sample to its reward, such as of a judge or tests (default: 0)",
    )
    parser.add_argument(
        "--train-seconds", metavar="SECONDS",
        help="training time of one rollout step on the given trainer ranks; scaled when --sweep varies the ranks",
    )  # fmt: skip
    parser.add_argument(
        "--publish-seconds", metavar="SECONDS", help="seconds each publication pauses the engines (default: 0)"
    )
    parser.add_argument(
        "--copy-seconds", type=_seconds, metavar="S",
        help="seconds to export and copy new weights, while engines generate and training waits (default: 0)",
    )  # fmt: skip
    estimated = parser.add_argument_group("Estimates of missing durations")
    estimated.add_argument(
        "--gpu", metavar="GPU",
        help=f"estimate missing durations from config.json and a data sheet ({', '.join(GPUS)}), or from report.json "
        "of `make gpu-hour`, whose figures replace assumptions",
    )  # fmt: skip
    estimated.add_argument(
        "--response-tokens",
        metavar="TOKENS",
        help="tokens per response, a distribution written like SECONDS, such as lognormal:6000:0.8:32768",
    )
    estimated.add_argument(
        "--prompt-tokens", type=at_least_one, default=512, metavar="N", help="prompt length in tokens (default: 512)"
    )
    estimated.add_argument(
        "--mfu", type=_share, metavar="SHARE",
        help=f"model FLOPs utilization in training, as a share of the peak (default: {Assumptions.mfu})",
    )  # fmt: skip
    estimated.add_argument(
        "--decode-use", type=_share, metavar="SHARE",
        help=f"share of the peak memory bandwidth reached in decoding (default: {Assumptions.decode_use})",
    )  # fmt: skip
    estimated.add_argument(
        "--link-gbytes", type=_above_zero, metavar="GB",
        help=f"bandwidth from one sending rank to the engines, in GB/s (default: {Assumptions.link / GB:g})",
    )  # fmt: skip
    parser.add_argument(
        "--engine-slots", type=at_least_one, metavar="N",
        help="requests an engine runs at once; the rest queue (default: --rollout-concurrency-per-engine)",
    )  # fmt: skip
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="FLAG=VALUE,...",
        help="train flags to vary, in every combination (default: bounds and leads worth comparing)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=at_least_one, default=60, metavar="N", help="steps to simulate per setting (default: 60)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the simulation (default: 0)")
    parser.add_argument("--memory", action="store_true", help="show the memory per GPU instead of a simulation")
    parser.add_argument("--output", type=Path, metavar="FILE", help="draw the plan into this PNG")
    return parser


def _above_zero(text: str) -> float:
    if not (number := float(text)) > 0 or math.isinf(number):
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text}")
    return number


def _share(text: str) -> float:
    if (number := _above_zero(text)) > 1:
        raise argparse.ArgumentTypeError(f"expected a share of at most 1, found {text}")
    return number


def _seconds(text: str) -> float:
    distribution = parse_distribution(text, "--copy-seconds")
    if not isinstance(distribution, Fixed):
        raise argparse.ArgumentTypeError(f"expected a number of seconds, found {text}")
    return distribution.seconds
