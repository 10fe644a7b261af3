"""Settings of servers from flags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miles_async.arguments import Arguments, ClusterArguments, ModelArguments, WeightsArguments
from miles_async.arguments.server_groups import ServerGroup
from miles_async.engines.stack import EngineStack
from miles_async.errors import ConfigurationError
from miles_async.runtime.network.keys import EngineKeys, Secret
from miles_async.weights import fp8
from miles_async.wiring.engines import ForkedEngines, RunEngines, StackMaker, server_spec
from miles_async.wiring.placement import RunPlacement
from miles_async.wiring.trainer_process import SHARED_WITH_ENGINES, shared_directories


@pytest.mark.parametrize(("role", "published"), [("train", True), ("evaluation", True), ("frozen", False)])
def test_only_frozen_engines_start_with_the_weights_of_their_checkpoint(
    role: str, published: bool, tmp_path: Path
) -> None:
    # covers: C8
    spec = server_spec(Arguments(), ServerGroup(name="group", role=role), tmp_path, "cpu")
    assert (spec.dummy_weights, spec.held_weights, spec.publication_seconds > 0) == (published, published, published)


@pytest.mark.parametrize(
    ("in_files", "quantization", "expected"),
    [
        (False, "none", {}),
        (False, "fp8", {"quantization_config": fp8.CONFIG}),
        (True, "fp8", {"quantization_config": fp8.CONFIG}),
        (True, "none", {"quantization_config": None}),
    ],
)
def test_engines_expect_weights_in_the_form_in_which_they_are_published(
    in_files: bool, quantization: Any, expected: dict[str, object], tmp_path: Path
) -> None:
    # covers: C8
    config = {"model_type": "qwen3"} | ({"quantization_config": {"quant_method": "fp8"}} if in_files else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = Arguments(
        model=ModelArguments(hf_checkpoint=tmp_path), weights=WeightsArguments(rollout_quantization=quantization)
    )
    trained, frozen = (
        server_spec(arguments, ServerGroup(name="group", role=role), tmp_path, "cpu") for role in ("train", "frozen")
    )
    assert trained.model_overrides == expected
    assert frozen.model_overrides == {}  # it reads its files


def maker_of(run_dir: Path, marks: Mapping[str, Path] | None = None) -> StackMaker:
    return StackMaker(
        arguments=Arguments(),
        run_dir=run_dir,
        device="cpu",
        keys=EngineKeys(api=Secret("a"), admin=Secret("b")),
        forked=ForkedEngines(),
        marks=marks or {},
        placement=RunPlacement(),
    )


@pytest.mark.parametrize(("external", "streams"), [((), True), (("10.0.0.1:30000",), False)])
def test_only_engines_that_we_start_receive_a_publication_by_one_call(
    external: tuple[str, ...], streams: bool, tmp_path: Path
) -> None:
    # covers: C8
    group = ServerGroup(name="group", role="train", external=external)
    assert maker_of(tmp_path)._group(group).streams is streams


def test_engines_check_their_model_and_what_they_share_with_the_ranks(tmp_path: Path) -> None:
    # covers: C10
    marks = {"--weight-staging-dir": tmp_path / "mark"}
    maker = maker_of(tmp_path, marks)
    for model, present in ((str(tmp_path), [tmp_path]), ("Qwen/Qwen3-0.6B", [])):
        launch: Any = maker._group(ServerGroup(name="group", role="train", model=model)).launch
        assert list(launch.spec.files.present.values()) == present
        assert launch.spec.files.shared == marks


def test_with_files_to_load_staging_is_shared_with_engines(tmp_path: Path) -> None:
    # covers: C10
    arguments = Arguments(
        cluster=ClusterArguments(ray_address="10.0.0.1:6379"),
        weights=WeightsArguments(weight_transport="disk", weight_staging_dir=tmp_path),
    )
    assert shared_directories(arguments).keys() == SHARED_WITH_ENGINES
    by_network = replace(arguments, weights=WeightsArguments(weight_staging_dir=tmp_path))
    assert not shared_directories(by_network)


@pytest.mark.parametrize(
    ("config", "vocabulary"), [({"vocab_size": 64}, 64), ({"text_config": {"vocab_size": 32}}, 32), ({}, None)]
)
def test_the_vocabulary_is_that_of_the_text_model(
    config: Mapping[str, object], vocabulary: int | None, tmp_path: Path
) -> None:
    # covers: C12
    (tmp_path / "config.json").write_text(json.dumps(config))
    maker = replace(maker_of(tmp_path), arguments=Arguments(model=ModelArguments(hf_checkpoint=tmp_path)))
    assert maker(EngineStack, "router", [ServerGroup(name="group", role="train")]).client._vocabulary == vocabulary
    assert maker(EngineStack, "router", [ServerGroup(name="group", role="frozen")]).client._vocabulary is None


def test_the_flag_for_a_tokenizers_code_reaches_engines_of_the_trained_model_alone(tmp_path: Path) -> None:
    arguments = Arguments(model=ModelArguments(hf_checkpoint=tmp_path, trust_remote_code=True))
    own = server_spec(arguments, ServerGroup(name="own", role="train"), tmp_path, "cpu")
    judge = server_spec(arguments, ServerGroup(name="judge", role="frozen", model="other"), tmp_path, "cpu")
    assert (own.trust_remote_code, judge.trust_remote_code) == (True, False)


async def test_engines_that_take_turns_with_the_trainer_keep_their_number(tmp_path: Path) -> None:
    arguments = Arguments(cluster=ClusterArguments(colocate=True), model=ModelArguments(hf_checkpoint=tmp_path))
    engines = RunEngines(replace(maker_of(tmp_path), arguments=arguments))
    with pytest.raises(
        ConfigurationError, match=r"group engine takes turns with the trainer on its GPUs \(--colocate\)"
    ):
        await engines.scale("engine", 1)
    await engines.stop()
