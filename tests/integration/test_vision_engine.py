"""A vision-language model that Megatron trains is published whole to a real SGLang server; both read images alike."""

from __future__ import annotations

import asyncio
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file

from examples.vision import prepare
from miles_async.arguments.routing import RouterShape
from miles_async.engines.answer_guard import check_answer, experts_of
from miles_async.staleness.versions import token_versions
from miles_async.types import GenerateRequest, Generation
from tests.integration.example_runs import trained_samples
from tests.integration.publishing import OneEngine, Trainer, one_engine, published_spec, publishing
from tests.integration.rank_processes import run_ranks
from tests.integration.real_run import real_run
from tests.integration.routing_scenario import observe_differences
from tests.integration.served_models import served_spec
from tests.integration.test_routing_replay_real import save_rounded, undecided
from tests.integration.tiny_models import VOCAB
from tests.integration.toy_batches import ToySample, to_batch
from tests.integration.vision_models import CONFIGS, IMAGE, VIDEO, cases, save_served_vision, vision_samples

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # megatron's about fused kernels, torch's about names that megatron uses
]

SAMPLES = 3  # of each prompt
SAMPLING = {"temperature": 1.0, "stop_token_ids": [IMAGE, VIDEO]}


async def answer(
    engine: OneEngine, request: GenerateRequest, sample: int, version: int, *, experts: bool = False
) -> Generation:
    body = engine.server.encode(request, request_id=f"v{version}-{sample}", version=version, experts=experts)
    headers = {"Content-Type": "application/json"}
    async with engine.http.session.post(f"{engine.url}/generate", data=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        reply = await response.read()
    versions = partial(token_versions, dispatch_version=version, tokens_in_flight=1)
    found = engine.server.decode(reply, response.content_type, engine.url, versions)
    check_answer(found, request, VOCAB, engine.url)
    return found


def prompts(tokens: int) -> list[GenerateRequest]:
    """``SAMPLES`` of each prompt, of so many tokens."""
    return [
        GenerateRequest(
            input_ids=np.array(ids, np.int32),
            sampling=SAMPLING | {"max_new_tokens": tokens},
            routing_key="",
            pictures=pictures,
            image_token=IMAGE,
        )
        for ids, pictures in cases()[2:] * SAMPLES  # prompts don't end at a placeholder
    ]


TENSOR_PARALLEL = ("--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2")
ADAPTERS = ("--lora-rank", "4", "--lora-alpha", "8", "--lr", "1e-2")


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [(), TENSOR_PARALLEL, (*TENSOR_PARALLEL, *ADAPTERS)],
    ids=["one rank", "two tensor-parallel ranks", "two with adapters"],
)
def test_agents_show_images(
    more: tuple[str, ...], tmp_path: Path, imported_reverse: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn's images, those of the prompt and those of the agent, are read by engine and trainer alike, which have
    the same weights element by element.
    """
    # covers: C8, M13, M14, R3
    monkeypatch.setattr(prepare, "WARM_START_STEPS", 0)
    monkeypatch.setattr(prepare, "VOCABULARY", (*prepare.VOCABULARY, "none"))  # two ranks have half of it each
    monkeypatch.setitem(prepare.IDS, "none", len(prepare.IDS))
    prepare.main(["--output", str(tmp_path)])
    flags = {
        "--hf-checkpoint": tmp_path / "model",
        "--prompt-data": tmp_path / "data" / "train.jsonl",
        "--image-root": tmp_path / "data" / "pictures",
        "--eval-prompt-data": "none",
        "--eval-interval": "none",
        "--num-rollout": 2,
        "--rollout-batch-size": 2,
        "--n-samples-per-prompt": 4,
        "--rollout-max-response-len": 40,
        "--agent-path": "tests.integration.picture_agent:show",
    }
    words = [str(word) for flag in flags.items() for word in flag]
    program = (*imported_reverse[: imported_reverse.index("train")], "train", "@examples/vision/colours.args")
    with real_run(tmp_path / "run", *words, *more, "--record", command=program) as run:
        assert run.wait(200) == 0, run.output
        run.assert_nothing_left()
    assert run.summary["balanced"]
    assert run.summary["logprob_diff"]["max"] < 1e-4
    tensors = len(load_file(tmp_path / "model" / "model.safetensors"))
    assert [step["publish/compared_tensors"] for step in run.steps[:-1]] == [tensors]
    samples = [*trained_samples(run)]
    assert len(samples) == 2 * 2 * 4
    for sample in samples:
        assert [(each.width, each.height) for each in sample.pictures] == [(56, 56), (56, 84)]
        assert sample.metadata["turns"] == 2
        assert not sample.more_branches


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if "moe" in name else []) for name in CONFIGS]
)
async def test_engines_read_images_as_the_trainer_does(name: str, tmp_path: Path, engine_imports: Path) -> None:
    # covers: C8, M16
    model = save_served_vision(tmp_path / "model", name)
    spec = published_spec(model, tmp_path, engine_imports)
    requests = prompts(12)
    async with one_engine(spec) as engine:
        with closing(Trainer(model, vision_samples)) as trainer:
            async with publishing(trainer, engine.fleet, tmp_path / "staged", tolerance=1e-4) as published:
                for version in range(2):
                    publication = await published.next()
                    assert publication.engines == ("engine-0",)
                    compared = (publication.compared_tensors, publication.incomparable_tensors)
                    assert compared == (len(trainer.weights()), 0)
                    calls = [answer(engine, request, sample, version) for sample, request in enumerate(requests)]
                    for request, found in zip(requests, await asyncio.gather(*calls), strict=True):
                        sequence = [*request.input_ids.tolist(), *found.output_ids.tolist()]
                        trained = trainer.logprobs(sequence, request.pictures)[len(request.input_ids) - 1 :]
                        np.testing.assert_allclose(found.logprobs, trained, atol=1e-4)


@pytest.mark.long
async def test_experts_of_tokens_that_stand_for_images_are_replayed(tmp_path: Path, engine_imports: Path) -> None:
    """The server has read the model's files itself."""
    # covers: M19, C12
    model = undecided(save_served_vision(tmp_path / "model", "qwen3-vl-moe"))
    spec = served_spec(model, tmp_path / "logs", engine_imports, weight_version=0, routed_experts=True)
    requests, routers = prompts(60), RouterShape(layers=6, topk=2, experts=12)
    async with one_engine(spec) as engine:
        calls = [answer(engine, request, sample, 0, experts=True) for sample, request in enumerate(requests)]
        answers = await asyncio.gather(*calls)
    samples, experts = [], []
    for number, (request, found) in enumerate(zip(requests, answers, strict=True)):
        generated, before = len(found.output_ids), np.zeros(len(request.input_ids))
        told = experts_of(found, request, routers, engine.url)
        assert told is not None
        experts += [told, np.zeros_like(told[:1])]  # those of the last token are no matter
        samples.append(
            ToySample(
                tokens=np.r_[request.input_ids, found.output_ids],
                loss_mask=np.r_[before, np.ones(generated)],
                rollout_logprobs=np.r_[before, found.logprobs],
                weight_versions=np.r_[before - 1, np.zeros(generated)],
                advantage=1.0,
                number=number,
                pictures=request.pictures,
            )
        )
    batch = msgspec.structs.replace(to_batch(samples), routed_experts=np.concatenate(experts))
    rounded = save_rounded(model, tmp_path / "rounded")
    [differences] = run_ranks(1, observe_differences, rounded, batch)
    assert differences["replayed"] < 0.2 * differences["free"]
