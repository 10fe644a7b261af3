"""What SGLang decides for the engines of each preset, from the command that we start them with; and whether it has all
that the launcher patches.
"""

from __future__ import annotations

import inspect
import json
import os
import pkgutil
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec

from miles_async.arguments.parser import parse_arguments
from miles_async.arguments.server_groups import server_groups
from miles_async.backends.megatron.families.known import FAMILIES
from miles_async.engines.kind import ServerSpec
from miles_async.engines.sglang import HELD_WEIGHTS_VARIABLE, WEIGHT_GROUP_SECONDS_VARIABLE
from miles_async.engines.sglang.server import server_command, server_environment
from miles_async.wiring.engines import server_spec
from tests.unit.arguments.test_model_presets import CASES, config_of

COLOCATED = "qwen3-30b-a3b-offload"  # with the preset 1x8-colocate
SERVER = ("127.0.0.1", 30000, ("127.0.0.1", 30001), 0, 0)  # where it would be


def spec_of(preset: str, model: str, folder: Path, *flags: str) -> ServerSpec:
    directory = folder / model
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_bytes(config_of(model).read_bytes())
    words = [f"@preset:{preset}", "--hf-checkpoint", str(directory), "--device", "cuda", "--rollout-num-gpus", "32"]
    arguments = parse_arguments([*words, "--ray-address", "auto", *flags], prog="contract").arguments
    spec = server_spec(arguments, server_groups(arguments)[0], folder, "cuda")
    return msgspec.structs.replace(spec, gpus=("0",) * spec.tensor_parallel_size) if preset == COLOCATED else spec


def row(preset: str, spec: ServerSpec) -> str:
    """The settings that SGLang chooses for the command, as a row of docs/sglang_choices.tsv."""
    from sglang.srt.server_args import prepare_server_args

    os.environ.update(server_environment(spec))
    settings = prepare_server_args(server_command(spec, *SERVER)[2:])
    settings.resolve_once()
    settings.check_server_args()
    chosen: dict[str, Any] = settings.resolved_dict()
    decode, prefill = (chosen["cuda_graph_config"][phase] for phase in ("decode", "prefill"))
    cells = [
        f"{preset}, colocated" if spec.gpus else preset,
        chosen["tp_size"],
        chosen["ep_size"],
        chosen["attn_dp_size"],
        chosen["attention_backend"],
        chosen["sampling_backend"],
        chosen["moe_runner_backend"],
        round(chosen["mem_fraction_static"], 3),
        chosen["page_size"],
        chosen["chunked_prefill_size"],
        f"{decode['backend']}, {decode['max_bs']}",
        f"{prefill['backend']}, {prefill['max_bs']}",
        "off" if chosen["disable_overlap_schedule"] else "on",
        chosen["mamba_radix_cache_strategy"] if chosen["uses_mamba_radix_cache"] else "",
    ]
    return "\t".join(map(str, cells))


def quantization(preset: str, spec: ServerSpec) -> tuple[str, str | None]:
    """The preset, and the quantization that SGLang chooses for its engines."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import prepare_server_args

    os.environ.update(server_environment(spec))
    settings = prepare_server_args(server_command(spec, *SERVER)[2:])
    settings.resolve_once()
    settings.check_server_args()
    return preset, ModelConfig.from_server_args(settings).quantization


def hook_problems(hooks: dict[str, list[tuple[Any, Any, Any]]]) -> Iterator[str]:
    """Functions of SGLang that a hook of ours cannot stand around, since they are absent or take something else."""
    for target, registered in hooks.items():
        try:
            signature = inspect.signature(pkgutil.resolve_name(target))
            given = [each for each in signature.parameters.values() if each.default is each.empty]
            named = {each.name: None for each in given if each.kind is each.KEYWORD_ONLY}
            by_place = [None for each in given if each.kind is each.POSITIONAL_OR_KEYWORD]
            for _, hook, _ in registered:
                inspect.signature(hook).bind(None, *by_place, **named)  # the first is the function, or its result
        except (AttributeError, ImportError, TypeError) as error:
            yield f"{target}: {error}"


def main(found: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # Flags of Megatron are read from its sources, which the launcher hides.
        specs = [(preset, spec_of(preset, model, Path(folder))) for preset, model in CASES]
        float8 = [
            (preset, spec_of(preset, model, Path(folder), "--rollout-quantization", "fp8"))
            for preset, model in CASES
            if FAMILIES[json.loads(config_of(model).read_text())["model_type"]].float8
        ]
        sys.argv[1:] = ["--device=cuda", "--load-format=dummy"]
        os.environ |= {HELD_WEIGHTS_VARIABLE: "1", WEIGHT_GROUP_SECONDS_VARIABLE: "60"}
        from sglang.srt.plugins import load_plugins
        from sglang.srt.plugins.hook_registry import HookRegistry

        from miles_async.engines.sglang import launcher, packed_answers  # noqa: F401

        packed_answers.register()
        problems = [*hook_problems(HookRegistry._hooks)]
        load_plugins()
        problems += [f"{target}: not applied" for target in HookRegistry._hooks if target not in HookRegistry._patched]
        with get_context("fork").Pool(2, maxtasksperchild=1) as pool:  # environment and settings are a process's
            rows = pool.starmap(row, specs, chunksize=1)
            quantizations = dict(pool.starmap(quantization, float8, chunksize=1))
    found.write_text(json.dumps({"hooks": problems, "rows": list(dict.fromkeys(rows)), "quantizations": quantizations}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
