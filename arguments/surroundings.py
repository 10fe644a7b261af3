"""Check what flags point to: model directories, prompt files, output directories, a port.

Each check yields one line per problem, naming the flag and what was found.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from miles_async.arguments import Arguments
from miles_async.arguments.evaluation import parse_data_sets
from miles_async.arguments.evaluation_sets import evaluation_sets
from miles_async.arguments.model import EXPERT_COUNTS
from miles_async.arguments.model_files import directory_problems, read_config
from miles_async.arguments.problems import refusal
from miles_async.arguments.prompt_files import EXPECTED, HUB, SUFFIXES, split_slice
from miles_async.arguments.server_groups import server_groups
from miles_async.errors import ConfigurationError


def check_model(arguments: Arguments) -> Iterator[str]:
    """Check that the model directories hold complete models."""
    for flag, path in arguments.model_directories.items():
        yield from directory_problems(path, flag)


def check_model_fits(arguments: Arguments) -> Iterator[str]:
    """Check that the parallel sizes divide the model, and that it has positions for prompt and response."""
    model, path = arguments.model, arguments.model.hf_checkpoint
    config = read_config(path) if path else {}
    sizes = {
        "--tensor-model-parallel-size": (model.tensor_model_parallel_size, "num_attention_heads"),
        "--rollout-num-gpus-per-engine": (arguments.cluster.rollout_num_gpus_per_engine, "num_attention_heads"),
    }
    if experts := next((name for name in EXPERT_COUNTS if config.get(name)), None):
        sizes["--expert-model-parallel-size"] = model.expert_model_parallel_size, experts
        sizes["--expert-tensor-parallel-size"] = model.expert_tensor_size, "moe_intermediate_size"
    elif config and model.splits_experts:
        yield (
            "--expert-model-parallel-size and --expert-tensor-parallel-size split the experts of a mixture, but "
            f"--hf-checkpoint {path} has none: leave them out"
        )
    for flag, (size, key) in sizes.items():
        found = config.get(key)
        if isinstance(found, int) and found % size:
            yield f"{flag} {size} does not divide the model's {key} {found}"
    if isinstance(layers := config.get("num_hidden_layers"), int):
        yield from refusal(lambda: model.stage_layers(layers))
    longest = arguments.longest_sample
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and longest > positions and not arguments.algorithm.supervised:
        yield (
            f"prompt and response may have {longest} tokens, more than the model's max_position_embeddings "
            f"{positions}: lower --rollout-max-response-len or --rollout-max-prompt-len"
        )


def check_data_sets(arguments: Arguments) -> Iterator[str]:
    """Check the form of --prompt-data, its weights, --eval-prompt-data and --eval-config."""
    problems = list(refusal(lambda: arguments.data.places))
    yield from problems or refusal(lambda: arguments.data.weights)
    if arguments.data.difficulty_low >= arguments.data.difficulty_high:
        yield (
            f"--difficulty-low {arguments.data.difficulty_low:g} is not below --difficulty-high "
            f"{arguments.data.difficulty_high:g}: all prompts would rest"
        )
    yield from refusal(lambda: evaluation_sets(arguments.evaluation))


def check_prompt_files(arguments: Arguments) -> Iterator[str]:
    """Check that prompt files exist; ``miles_async.prompts`` checks their rows."""
    files: list[tuple[str, str]] = []
    with suppress(ConfigurationError):  # check_data_sets reports it
        files += [("--prompt-data", place) for _, place in arguments.data.places]
    with suppress(ConfigurationError):
        named = parse_data_sets(arguments.evaluation.eval_prompt_data or ())
        held_out = evaluation_sets(arguments.evaluation)
        files += [("--eval-prompt-data" if x.name in named else "--eval-config", x.path) for x in held_out]
    for flag, place in files:
        file, _ = split_slice(place)
        if file.startswith(HUB):
            continue
        if not os.path.exists(file):
            makers = [each for folder in Path(file).parents if os.path.exists(each := folder / "prepare.py")]
            hint = f" ({makers[0]} makes it)" if makers else ""
            literal = ": variables are not expanded here, a ~ is" if file.startswith("$") else ""
            yield f"{flag} {place}: there is no such file{hint}{literal}"
        elif os.path.isdir(file) is file.endswith(SUFFIXES):
            yield f"{flag} {place}: expected {EXPECTED}"


def check_pass_rates(arguments: Arguments) -> Iterator[str]:
    """Check that --pass-rates names directories of other runs; ``miles_async.prompts`` reads their ledgers."""
    own = arguments.observability.run_dir.absolute()
    for directory in arguments.data.pass_rates:
        if not os.path.isdir(directory):
            yield f"--pass-rates {directory}: there is no such directory"
        elif Path(directory).absolute() == own:
            yield (
                f"--pass-rates {directory} is --run-dir, which this run moves aside: choose another --run-dir. This "
                "run's own groups count anyway"
            )


def check_outputs(arguments: Arguments) -> Iterator[str]:
    """Check that output directories are writable, and that checkpoints fit the flags."""
    checkpoint = arguments.checkpoint
    if checkpoint.max_run_restarts and checkpoint.save is not None and checkpoint.save_interval is None:
        yield "--max-run-restarts without --save-interval: a restarted run would begin from zero"
    run_dir = arguments.observability.run_dir.absolute()
    save = checkpoint.save.absolute() if checkpoint.save is not None else None
    retained, interval = checkpoint.save_retain_interval, checkpoint.save_interval
    if save is not None and retained is not None and (interval is None or retained % interval):
        yield (
            f"--save-retain-interval {retained} keeps checkpoints of every {retained} steps, and --save-interval "
            f"{interval or 'none'} does not write them: give a multiple of --save-interval"
        )
    if checkpoint.load is not None and not os.path.isdir(checkpoint.load):
        yield f"--load {checkpoint.load}: there is no such directory; leave --load out to start a new run"
    if checkpoint.load is not None and checkpoint.load.absolute().is_relative_to(run_dir):
        yield f"--load {checkpoint.load} is inside --run-dir {run_dir}, which starts empty: choose another --run-dir"
    if save is not None and save.is_relative_to(run_dir):
        yield (
            f"--save {checkpoint.save} is inside --run-dir {run_dir}, which the next run moves aside: choose a "
            "directory outside of it"
        )
    model = arguments.model.hf_checkpoint
    if checkpoint.save_hf is not None and model is not None and checkpoint.save_hf.resolve() == model.resolve():
        yield f"--save-hf {checkpoint.save_hf} is --hf-checkpoint, which it would overwrite: choose another directory"
    outputs = {
        "--run-dir": arguments.observability.run_dir,
        "--save": checkpoint.save,
        "--save-hf": checkpoint.save_hf,
        "--weight-staging-dir": arguments.weights.weight_staging_dir,
        "--tensorboard-dir": arguments.observability.tensorboard_dir,
        "--save-debug-rollout-data": arguments.debug.save_debug_rollout_data,
    }
    for flag, path in outputs.items():
        directory = path.parent if path is not None and flag == "--save-debug-rollout-data" else path
        problem = directory and _output_problem(directory)
        if problem:
            yield f"{flag} {path}: {problem}"


def _output_problem(path: Path) -> str | None:
    """Why nothing can be written below ``path``. Tried, since permission bits don't tell (root, /proc, full disks)."""
    if os.path.exists(path) and not os.path.isdir(path):
        return "expected a directory, found a file"
    nearest = nearest_existing(path)
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b"0")
    except OSError as error:
        return f"{nearest} cannot be written to ({error.strerror}): choose another directory"
    return None


def nearest_existing(path: Path) -> Path:
    """Return ``path`` or the nearest of its parents that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if os.path.exists(place))


def check_machine(arguments: Arguments) -> Iterator[str]:
    """Check that folders and addresses of a run without a cluster are this machine's."""
    cluster, images = arguments.cluster, arguments.data.image_root
    if cluster.ray_address is not None:
        return
    if images is not None and not os.path.isdir(images):
        yield f"--image-root {images}: there is no such directory"
    with suppress(ConfigurationError):  # reported by check_server_groups
        for group in server_groups(arguments):
            if group.model is not None and not os.path.isdir(group.model):
                where = f"--server-groups {arguments.engines.server_groups}: [groups.{group.name}]"
                yield f"{where}: model {group.model}: there is no such directory (nothing is downloaded)"
    if cluster.host is not None and ":" not in cluster.host:  # reported by check_network
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            try:
                listener.bind((cluster.host, 0))
            except OSError as error:
                yield f"--host {cluster.host}: expected an address or a name of this machine ({error.strerror})"


def check_router_port(arguments: Arguments) -> Iterator[str]:
    """Check that --sglang-router-port is free on this machine."""
    port = arguments.engines.sglang_router_port
    if port is None or not 1 <= port <= 65535:  # the second is reported with the other ranges
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            yield (
                f"--sglang-router-port {port} cannot be used ({error.strerror}): stop what listens there, choose "
                "another port, or leave the flag out for a free one"
            )
