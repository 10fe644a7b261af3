"""Experts that a real SGLang server tells, from its answers to the trainer's log-probs.

# covers: M19, C12
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from miles_async.arguments.routing import RouterShape
from miles_async.engines.http import Http
from miles_async.engines.kind import ServerSpec
from miles_async.engines.server_process import ServerProcess
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.sglang.kind import SGLANG
from miles_async.rollout.generate import SingleTurnGenerate
from miles_async.staleness.versions import group_of
from miles_async.train_data.batch import tabulate
from miles_async.types import Attempt, Prompt, Sample
from tests.fakes.clients import client_of, registry_of, serving
from tests.fakes.text_of_tokens import TextOfTokens
from tests.integration.rank_processes import run_ranks
from tests.integration.routing_scenario import observe_differences
from tests.integration.served_models import save_served, served_spec
from tests.integration.test_routing_replay import router_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LAYERS = {"qwen3-moe": 2, "gemma4-moe": 2, "nemotron-h-moe": 4}
SAMPLES, TOKENS = 6, 300


def undecided(directory: Path) -> Path:
    """Have the routers of the model there give all experts nearly the same score, so that rounding decides."""
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("gate.weight", "router.proj.weight")):
            tensors[name] = tensor[:1] + 0.02 * tensor
        elif name.endswith("gate.e_score_correction_bias"):
            tensors[name] = torch.zeros_like(tensor)
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def save_rounded(source: Path, directory: Path) -> Path:
    """The model with all weights rounded to bfloat16."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, directory)
    rounded = {name: tensor.bfloat16().float() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(rounded, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


async def generate(spec: ServerSpec, routers: RouterShape) -> list[Sample]:
    """Samples of one server; all requests are aborted on their way, and go on."""
    server, http = ServerProcess(SGLANG, spec, 0, 0), Http()
    url = await server.start()
    try:
        client, api = client_of(http, registry_of(serving(url)), lambda: url, routers=routers), SGLangServer(http)
        make = SingleTurnGenerate({"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True}, TextOfTokens(str))
        draw = np.random.default_rng(0)
        prompts = [tuple(draw.integers(3, 64, 20).tolist()) for _ in range(SAMPLES)]
        async with asyncio.TaskGroup() as scope:
            tasks = [scope.create_task(make(client, attempt(number, ids), 0)) for number, ids in enumerate(prompts)]
            while not (await api.load(url, 60.0)).running:  # noqa: ASYNC110, the engine tells nobody
                await asyncio.sleep(0.002)
            await api.pause(url, "abort", 10.0)
            await api.resume(url, 10.0)
        return [task.result() for task in tasks]
    finally:
        await http.close()
        await server.stop()


def attempt(number: int, ids: tuple[int, ...]) -> Attempt:
    return Attempt(attempt_id=number, prompt=Prompt(prompt_id=str(number), token_ids=ids, text=""), epoch=0)


def plain_choices(model: Path, samples: Sequence[Sample]) -> list[dict[int, np.ndarray]]:
    """Layer → [T, top-k]: experts that the routers of transformers choose, sorted."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    chosen: dict[int, np.ndarray] = {}

    def note(layer: int, _: object, __: object, output: tuple[torch.Tensor, ...]) -> None:
        chosen[layer] = output[2].sort(-1).values.numpy()

    for layer, module in enumerate(plain.model.layers):
        if (router := router_of(module)) is not None:
            router.register_forward_hook(partial(note, layer))
    result = []
    for sample in samples:
        with torch.no_grad():
            plain(torch.tensor(sample.tokens[None].astype(np.int64)))
        result.append(dict(chosen))
    return result


@pytest.mark.parametrize(
    "family", [name if name == "qwen3-moe" else pytest.param(name, marks=pytest.mark.long) for name in LAYERS]
)
def test_experts_of_the_engine_bring_its_log_probs_to_the_trainer(
    family: str, tmp_path: Path, engine_imports: Path
) -> None:
    model = undecided(save_served(family, tmp_path / "model", seed=3))
    routers = RouterShape(layers=LAYERS[family], topk=2, experts=12)
    spec = served_spec(model, tmp_path / "logs", engine_imports, weight_version=0, routed_experts=True)
    samples = asyncio.run(generate(spec, routers))
    assert max(sample.metadata["chunks"] for sample in samples) > 1
    same = []
    for sample, expected in zip(samples, plain_choices(model, samples), strict=True):
        assert sample.routed_experts is not None
        assert sample.routed_experts.shape == (20 + TOKENS, routers.width)
        assert sample.routed_experts.dtype == np.uint8
        pairs = np.sort(sample.routed_experts.reshape(-1, routers.layers, 2), -1)
        assert expected
        same += [(pairs[:-1, layer] == chosen[:-1]).ravel() for layer, chosen in expected.items()]
    assert np.concatenate(same).mean() > 0.98  # they decide by less than rounding, here and there

    rewarded = [msgspec.structs.replace(sample, reward=1.0) for sample in samples]
    table = tabulate([group_of(attempt(0, (1,)), rewarded)], np.ones(SAMPLES, np.float32), with_experts=True)
    batch = table.join(range(SAMPLES))
    rounded = save_rounded(model, tmp_path / "rounded")
    [differences] = run_ranks(1, observe_differences, rounded, batch)
    assert differences["replayed"] < 0.2 * differences["free"]
