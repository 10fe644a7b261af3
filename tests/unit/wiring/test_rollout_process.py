"""Parts of the rollout process: the text of the canary, and the keys that hooks find in their environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_async.arguments import Arguments
from miles_async.arguments.data import DataArguments
from miles_async.arguments.live import with_flags
from miles_async.arguments.parser import assemble, parse_arguments
from miles_async.prompts.source import FilePromptSource
from miles_async.wiring.rollout_process import canary_length, hook_keys, run_canary
from tests.fakes.keys import KEYS


def canary(folder: Path, config: dict[str, object], max_tokens: int = 1000) -> tuple[int, ...]:
    (folder / "config.json").write_text(json.dumps(config))
    rows = [{"prompt": letter * 100, "label": ""} for letter in "abcdefg"]
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = FilePromptSource(DataArguments(prompt_data=(str(path),)), lambda text, tools: str(text).encode())
    return run_canary(source, folder, max_tokens)


@pytest.mark.parametrize(
    ("config", "max_tokens", "length"),
    [
        ({"vocab_size": 256}, 260, 260),
        ({"vocab_size": 256, "max_position_embeddings": 64}, 1000, 32),
        ({"text_config": {"vocab_size": 256, "max_position_embeddings": 512}}, 130, 130),
    ],
)
def test_the_first_prompts_as_far_as_model_and_trainer_take_them(
    tmp_path: Path, config: dict[str, object], max_tokens: int, length: int
) -> None:
    # covers: C8
    tokens = canary(tmp_path, config, max_tokens)
    assert bytes(tokens) == (b"a" * 100 + b"b" * 100 + b"c" * 100)[:length]


@pytest.mark.parametrize(
    ("flags", "length"),
    [
        ((), 256),
        (("--canary-length", "300"), 300),
        (("--canary-length", "9000"), 8192),
        (("--max-tokens-per-gpu", "100"), 100),
        (("--sglang-mem-fraction-static", "0.5", "--sglang-context-length", "200"), 100),
    ],
)
def test_flags_that_bound_it(flags: tuple[str, ...], length: int) -> None:
    arguments = parse_arguments(["--hf-checkpoint", "m", *flags]).arguments
    assert canary_length(arguments) == length


def test_every_group_that_gets_weights_bounds_it(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(
        "[groups.train.sglang]\ncontext-length = 300\n"
        '[groups.judge]\nrole = "frozen"\nsglang = { context-length = 20 }\n'
    )
    flags = ["--hf-checkpoint", "m", "--server-groups", str(fleet), "--sglang-context-length", "400"]
    assert canary_length(parse_arguments(flags).arguments) == 150


API, AGENTS = KEYS.engines.api.reveal(), KEYS.sessions.agents.reveal()


@pytest.fixture
def arguments(tmp_path: Path) -> Arguments:
    """A run with frozen engines at port 8400."""
    fleet = tmp_path / "fleet.toml"
    fleet.write_text('[groups.train]\nengines = 1\n[groups.judge]\nrole = "frozen"\nport = 8400\n')
    return assemble({"server_groups": fleet}, {})


def test_rewards_find_the_key_of_frozen_engines(arguments: Arguments) -> None:
    # covers: C13
    assert hook_keys(arguments, KEYS, {}) == {"MILES_ASYNC_API_KEY": API}


def test_an_agent_finds_the_key_of_sessions_and_no_other_of_them(arguments: Arguments) -> None:
    # covers: C13
    found = hook_keys(with_flags(arguments, {"agent_path": "m:solve"}), KEYS, {"OPENAI_API_KEY": "of the user"})
    assert found["OPENAI_API_KEY"] == AGENTS
    assert not {KEYS.sessions.run.reveal(), KEYS.engines.admin.reveal()} & {*found.values()}


@pytest.mark.parametrize(
    ("url", "own"),
    [
        ("http://127.0.0.1:8400/v1", True),
        ("http://localhost:8400/v1", True),
        ("http://127.0.0.1:8401/v1", False),
        ("https://api.example:8400/v1", False),  # the run's key is nobody else's business
        ("http://127.0.0.1/v1", False),
        (None, False),
    ],
)
def test_a_judge_is_sent_the_key_if_it_is_the_runs_own(arguments: Arguments, url: str | None, own: bool) -> None:
    # covers: C13
    assert hook_keys(with_flags(arguments, {"judge_url": url}), KEYS, {}).get("JUDGE_API_KEY") == (API if own else None)
