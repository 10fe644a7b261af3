"""Limits of prompts' lengths by flags and model, and messages about them before a run starts.

# covers: C3
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from miles_async.arguments import Arguments, DataArguments
from miles_async.arguments.evaluation_sets import EvaluationSet
from miles_async.arguments.parser import assemble
from miles_async.arguments.prompt_limit import asked_limit, prompt_limit, trajectory_limit
from miles_async.backends.megatron.memory.stages import StageRequest
from miles_async.prompts.row import Content
from miles_async.prompts.source import FilePromptSource
from miles_async.runs import memory
from miles_async.wiring.run_prompts import length_notes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 2048}')
    return tmp_path


def limit_of(arguments: Arguments, held_out: EvaluationSet | None = None) -> tuple[int, str, str] | None:
    limit = prompt_limit(arguments, held_out)
    return None if limit is None else (limit.tokens, limit.reason, limit.change)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            {},
            (1024, "--rollout-max-response-len 1024 leaves 1024 of the model's 2048 positions",
             "lower --rollout-max-response-len"),
        ),
        ({"rollout_max_prompt_len": 512}, (512, "--rollout-max-prompt-len is 512", "raise --rollout-max-prompt-len")),
        (
            {"rollout_max_prompt_len": 512, "rollout_max_response_len": 2000},
            (48, "--rollout-max-response-len 2000 leaves 48 of the model's 2048 positions",
             "lower --rollout-max-response-len"),
        ),
        (
            {"rollout_max_response_len": 4096},
            (0, "--rollout-max-response-len 4096 leaves none of the model's 2048 positions",
             "lower --rollout-max-response-len"),
        ),
        (
            {"custom_generate_function_path": "a:b"},
            (2047, "more than 2047 leave no room for a response in the model's 2048 positions", "leave them out"),
        ),
        (
            {"environment_path": "a:b", "max_tokens_per_gpu": 1500},
            (1499, "trajectories have at most 1500 tokens (--max-tokens-per-gpu, or the context of model and engines)",
             "raise --max-tokens-per-gpu"),
        ),
        (
            {"environment_path": "a:b"},
            (2047, "trajectories have at most 2048 tokens (--max-tokens-per-gpu, or the context of model and engines)",
             "raise --max-tokens-per-gpu"),
        ),
    ],
)  # fmt: skip
def test_the_lowest_limit_decides(model: Path, flags: dict[str, object], expected: tuple[int, str, str]) -> None:
    assert limit_of(assemble({"hf_checkpoint": model} | flags, {})) == expected


def test_held_out_prompts_have_room_beside_their_own_responses(model: Path) -> None:
    arguments = assemble({"hf_checkpoint": model, "eval_max_response_len": 2000}, {})
    found = limit_of(arguments, EvaluationSet(name="a", path="a.jsonl"))
    assert found is not None
    assert found[0] == 48
    assert "--eval-max-response-len 2000" in found[1]
    assert limit_of(arguments) != found


def test_without_positions_only_what_is_asked_for_counts(model: Path) -> None:
    (model / "config.json").write_text("{}")
    assert limit_of(assemble({"hf_checkpoint": model}, {})) is None
    assert prompt_limit(Arguments()) is asked_limit(DataArguments()) is None
    arguments = assemble({"hf_checkpoint": model, "environment_path": "a:b", "max_tokens_per_gpu": 100}, {})
    assert trajectory_limit(arguments) == 100


def test_engines_with_a_shorter_context_bound_prompts_and_trajectories(model: Path) -> None:
    passed = {"--sglang-mem-fraction-static": ("0.5",), "--sglang-context-length": ("1500",)}
    arguments = assemble({"hf_checkpoint": model}, passed)
    reason = "--rollout-max-response-len 1024 leaves 476 of the 1500 tokens of --sglang-context-length"
    assert limit_of(arguments) == (476, reason, "lower --rollout-max-response-len")
    assert trajectory_limit(assemble({"hf_checkpoint": model}, passed)) == 1500
    external = assemble({"hf_checkpoint": model, "rollout_external": ("127.0.0.1:1",)}, passed)
    assert trajectory_limit(external) == 2048  # the flag does not reach servers that are up already


def test_notes_tell_how_many_are_skipped_and_how_many_outgrow_a_micro_batch(model: Path) -> None:
    lengths = [*range(100, 1000, 100), 1200, 1300]
    data = model / "train.jsonl"
    data.write_text("".join(json.dumps({"prompt": "x" * length, "label": ""}) + "\n" for length in lengths))
    arguments = assemble({"hf_checkpoint": model, "prompt_data": (str(data),), "max_tokens_per_gpu": 1824}, {})
    limit = prompt_limit(arguments)
    source = FilePromptSource(arguments.data, lambda content, tools: [7] * len(content), limit)
    assert list(length_notes(arguments, source, limit)) == [
        f"{data}: 2 of 11 prompts are skipped: they have up to 1300 tokens, and --rollout-max-response-len 1024 leaves "
        "1024 of the model's 2048 positions",
        f"{data}: 1 of 11 prompts have up to 900 tokens; with --rollout-max-response-len 1024 their samples may exceed "
        "--max-tokens-per-gpu 1824, and then get separate micro-batches, which take more memory",
    ]
    roomy = replace(arguments, optimizer=replace(arguments.optimizer, max_tokens_per_gpu=8192))
    assert list(length_notes(roomy, source, None)) == []


def test_long_prompts_are_tokenized_once_and_none_where_any_sample_may_outgrow_a_micro_batch(model: Path) -> None:
    data = model / "train.jsonl"
    data.write_text("".join(json.dumps({"prompt": "x" * length, "label": ""}) + "\n" for length in (10, 900, 1500)))
    tokenized: list[int] = []

    def encode(content: Content, tools: object) -> list[int]:
        tokenized.append(len(content))
        return [7] * len(content)

    def notes(**flags: object) -> list[str]:
        arguments = assemble({"hf_checkpoint": model, "prompt_data": (str(data),)} | flags, {})
        tokenized.clear()
        limit = prompt_limit(arguments)
        return list(length_notes(arguments, FilePromptSource(arguments.data, encode, limit), limit))

    assert len(notes(max_tokens_per_gpu=1824)) == 2
    assert sorted(tokenized) == [10, 900, 1500]  # the first for what a template adds
    skipped, long = notes(max_tokens_per_gpu=1024)
    assert "1 of 3 prompts are skipped" in skipped
    assert long.startswith("with --rollout-max-response-len 1024 samples of any prompt may exceed")
    assert sorted(tokenized) == [10, 1500]


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ({"max_tokens_per_gpu": 2000}, 2000),
        ({"max_tokens_per_gpu": 100}, 1025),
        ({"max_tokens_per_gpu": 100, "context_parallel_size": 2}, 513),
        ({"max_tokens_per_gpu": 100, "agent_command": "agent"}, 100),
    ],
)
def test_memory_is_planned_for_a_sample_that_outgrows_a_micro_batch(flags: dict[str, object], tokens: int) -> None:
    assert assemble({"rollout_max_response_len": 1024} | flags, {}).most_tokens_per_rank == tokens


def test_activations_are_measured_for_the_largest_micro_batch(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(request: StageRequest) -> None:
        raise KeyError(request.tokens)

    monkeypatch.setattr(memory, "measure", measure)
    flags = {"hf_checkpoint": model, "max_tokens_per_gpu": 100, "rollout_max_response_len": 1024}
    with pytest.raises(KeyError, match="1025"):
        memory.memory_report(assemble(flags, {}))
