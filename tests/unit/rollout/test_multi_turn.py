"""Episodes with an environment: what the model is asked to continue, what is trained, what ends an episode."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from miles_async.api import Environment, MakeEnvironment
from miles_async.errors import (
    ConfigurationError,
    NoRoomError,
    OverdueError,
    RewardError,
    TransientEngineError,
    UserCodeError,
)
from miles_async.rollout.multi_turn import GivenReward, MultiTurnGenerate
from miles_async.runtime.hooks import load_factory
from miles_async.runtime.services import Circuit
from miles_async.trajectory.rendering import Renderer
from miles_async.trajectory.replies import ReplyParser
from miles_async.trajectory.taker import Limits
from miles_async.trajectory.tree import Trajectory
from miles_async.types import (
    NO_VERSION,
    AssistantTurn,
    Attempt,
    FinishReason,
    JsonObject,
    Observation,
    Prompt,
    Sample,
)
from miles_async.types.pictures import data_url
from tests.fakes.chat_formats import TOOLS, chat_format
from tests.fakes.pictures import picture, picture_processor
from tests.fakes.reply_parsers import parse_qwen
from tests.fakes.scripted_model import ScriptedModel
from tests.property.builders import make_sample

CHAT = chat_format("qwen3")
PROMPT = Prompt(prompt_id="p0", token_ids=(1,), text="17*4?", messages=({"role": "user", "content": "17*4?"},))
ATTEMPT = Attempt(attempt_id=7, prompt=PROMPT, epoch=0)
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "17*4"}}\n</tool_call>'
END = CHAT.tokenize("<|im_end|>")


class Lookup:
    """Answers a call with 68, and is done when there is none; the reward is whether 68 was said."""

    made: ClassVar[list[Lookup]] = []

    def __init__(self, prompt: Prompt) -> None:
        self.turns: list[AssistantTurn] = []
        self.closed = 0
        self.made.append(self)

    def tools(self) -> Sequence[Mapping[str, object]]:
        return TOOLS

    async def step(self, turn: AssistantTurn) -> Observation:
        self.turns.append(turn)
        calls = turn.message.get("tool_calls", ())
        if not calls:
            return Observation(done=True, reward=float(turn.text == "68"))
        return Observation(
            messages=tuple({"role": "tool", "content": "68", "tool_call_id": call["id"]} for call in calls),
            metrics={"lookups": len(calls), "tool_errors": 0.5},
        )

    async def close(self) -> None:
        self.closed += 1


def says(*texts: str) -> Callable[[int, list[int]], list[int]]:
    return lambda call, input_ids: [*CHAT.tokenize(texts[min(call, len(texts) - 1)]), *END]


def generate_with(make_environment: Any = Lookup, **options: object) -> MultiTurnGenerate:
    return MultiTurnGenerate(
        make_environment=make_environment,
        make_trajectory=lambda: Trajectory(Renderer(CHAT), ReplyParser(chat=CHAT, parse_calls=parse_qwen)),
        sampling={"temperature": 1.0},
        limits=options.pop("limits", Limits(response=1000, total=2000)),
        service=options.pop("service", Circuit("environment")),
        **{"max_turns": 4, "step_timeout": 5.0, **options},
    )


async def test_an_episode_becomes_one_sample_whose_observations_carry_no_loss() -> None:
    # covers: R2, R3, M1
    model = ScriptedModel(says(CALL, "68"), version=3)
    sample = await generate_with()(model, ATTEMPT, 1)
    first, second = model.requests
    prompt = CHAT.render(PROMPT.messages, TOOLS, {}, generation_prompt=True)
    assert CHAT.decode_all(first) == prompt
    observed = "\n<|im_start|>user\n<tool_response>\n68\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert CHAT.decode_all(second) == f"{prompt}{CALL}<|im_end|>{observed}"
    assert CHAT.decode_all(sample.tokens) == f"{prompt}{CALL}<|im_end|>{observed}68<|im_end|>"
    assert CHAT.decode_all(sample.tokens[sample.loss_mask == 1]) == f"{CALL}<|im_end|>68<|im_end|>"
    assert set(sample.weight_versions[sample.loss_mask == 0]) == {NO_VERSION}
    assert set(sample.weight_versions[sample.loss_mask == 1]) == {3}
    assert sample.prompt_length == len(first)
    assert (sample.text, sample.finish_reason, sample.reward) == ("68", "stop", 1.0)
    assert set(model.routing_keys) == {"7-1"}  # its turns find their prefix in the cache of one engine
    assert sample.metadata["cached_tokens"] == len(first) // 2 + len(second) // 2
    assert [message["role"] for message in sample.metadata["messages"]] == ["user", "assistant", "tool", "assistant"]
    (turn, _) = Lookup.made[-1].turns
    assert turn.message["tool_calls"][0]["function"] == {"name": "search", "arguments": {"query": "17*4"}}


@pytest.mark.parametrize("arguments", [r'"{\"query\": 1}"', '"null"', str(2**64)])
async def test_any_arguments_that_a_model_writes_are_continued_and_can_be_saved(arguments: str) -> None:
    call = f'<tool_call>\n{{"name": "search", "arguments": {arguments}}}\n</tool_call>'
    model = ScriptedModel(says(call, "68"))
    sample = await generate_with()(model, ATTEMPT, 0)
    first, second = model.requests
    assert sample.more_branches == ()
    assert second[: len(first)] == first
    assert arguments in CHAT.decode_all(second)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sample.metadata)) == sample.metadata


async def test_images_of_the_prompt_and_of_observations_are_read() -> None:
    chat = chat_format("qwen25_vl")
    images = picture_processor(chat)
    shown, found = picture(3, 1), picture(1, 2, "blue")

    class Camera(Lookup):
        async def step(self, turn: AssistantTurn) -> Observation:
            content = [{"type": "image_url", "image_url": {"url": data_url(found)}}, {"type": "text", "text": "and?"}]
            return Observation(messages=({"role": "user", "content": content},), done=turn.index == 1, reward=1.0)

    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    prompt = msgspec.structs.replace(PROMPT, messages=({"role": "user", "content": content},), pictures=(shown,))
    model = ScriptedModel(lambda call, input_ids: [*chat.tokenize("68<|im_end|>")])
    generate = dataclasses.replace(
        generate_with(Camera), make_trajectory=lambda: Trajectory(Renderer(chat, images), ReplyParser(chat=chat))
    )
    sample = await generate(model, msgspec.structs.replace(ATTEMPT, prompt=prompt), 1)
    assert model.pictures == [(shown,), (shown, found)]
    assert model.sampling[0]["stop_token_ids"] == sorted(images.placeholders)
    assert sample.pictures == (shown, found)
    assert chat.decode_all(sample.tokens).count("<|image_pad|>") == 3 + 2


async def test_turns_that_are_kept_tell_how_old_the_sample_is_at_least() -> None:
    # covers: C5
    begun: list[tuple[str, int]] = []

    def script(call: int, input_ids: list[int]) -> list[int]:
        model.version = 3 + call
        return [END, [*CHAT.tokenize(CALL), *END], [*CHAT.tokenize("68"), *END]][call]

    class Patient(Lookup):
        async def step(self, turn: AssistantTurn) -> Observation:
            said = await super().step(turn)
            return Observation(messages=({"role": "user", "content": "Go on."},)) if turn.index == 0 else said

    model = ScriptedModel(script)
    await generate_with(Patient, began=lambda key, version: begun.append((key, version)))(model, ATTEMPT, 1)
    assert len(model.requests) == 3
    # The first turn, of a stop token only, may leave no token of its own in the trajectory.
    assert begun == [("7-1", 4), ("7-1", 5)]


async def test_a_turn_that_a_publication_aborts_goes_on_under_the_new_version() -> None:
    # covers: R2, C1
    call_ids = [*CHAT.tokenize(CALL), *END]

    def script(call: int, input_ids: list[int]) -> list[int]:
        model.version = call
        return [call_ids, call_ids[5:], [*CHAT.tokenize("68"), *END]][call]

    model = ScriptedModel(script)
    model.aborts = {0: 5}
    sample = await generate_with()(model, ATTEMPT, 0)
    assert model.requests[1] == [*model.requests[0], *call_ids[:5]]
    versions = sample.weight_versions[sample.loss_mask == 1].tolist()
    assert versions == [0] * 5 + [1] * (len(call_ids) - 5) + [2] * (len(versions) - len(call_ids))
    assert sample.metadata["chunks"] == 3
    # covers: M19
    assert sample.routed_experts is not None
    assert sample.routed_experts[:, 0].tolist() == [*sample.tokens[:-1].tolist(), 0]
    first, second = len(model.requests[0]) + 5 - 1, len(model.requests[0]) + len(call_ids) - 1
    calls = [0] * first + [1] * (second - first) + [2] * (len(sample.tokens) - 1 - second)
    assert sample.routed_experts[:-1, 1].tolist() == calls


async def test_messages_that_an_environment_changes_later_are_a_history_that_was_edited() -> None:
    class Reuses(Lookup):
        hint: ClassVar[JsonObject] = {"role": "user", "content": ""}

        async def step(self, turn: AssistantTurn) -> Observation:
            self.hint["content"] += "again, "
            return Observation(messages=(self.hint,))

    model = ScriptedModel(says("68"))
    sample = await generate_with(Reuses, max_turns=3)(model, ATTEMPT, 1)
    assert "again, again, " in CHAT.decode_all(model.requests[2])
    assert CHAT.decode_all(model.requests[2]).count("again, again, ") == 2  # as the environment has it now
    assert len(sample.branches) == 2


async def test_counts_of_an_environment_are_added_up() -> None:
    sample = await generate_with()(ScriptedModel(says(CALL, CALL, "68")), ATTEMPT, 0)
    assert sample.metadata["metrics"] == {"lookups": 2, "tool_errors": 1.0}


async def test_a_turn_is_rewarded_at_its_last_token() -> None:
    # covers: R3
    class Grades(Lookup):
        async def step(self, turn: AssistantTurn) -> Observation:
            return msgspec.structs.replace(await super().step(turn), turn_reward=[0.5, 0.0, -2.0][turn.index])

    sample = await generate_with(Grades)(ScriptedModel(says(CALL, CALL, "68")), ATTEMPT, 0)
    assert sample.reward == 1.0
    assert sample.token_rewards is not None
    rewarded = np.flatnonzero(sample.token_rewards)
    ends = np.flatnonzero(np.diff(sample.loss_mask.astype(int), append=0) == -1)
    assert rewarded.tolist() == [ends[0], ends[2]]
    assert sample.token_rewards[rewarded].tolist() == [0.5, -2.0]

    plain = await generate_with()(ScriptedModel(says(CALL, "68")), ATTEMPT, 0)
    assert plain.token_rewards is None

    class Broken(Lookup):
        async def step(self, turn: AssistantTurn) -> Observation:
            return Observation(done=True, reward=1.0, turn_reward=float("nan"))

    with pytest.raises(RewardError, match="expected a finite number"):
        await generate_with(Broken)(ScriptedModel(says("68")), ATTEMPT, 0)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"metrics": {"errors": None}}, "a mapping of metrics to numbers"),
        ({"metrics": None}, "a mapping of metrics to numbers"),
        ({"messages": "Go on."}, "a tuple of messages"),
    ],
)
async def test_an_observation_that_cannot_be_used_is_shown(wrong: dict[str, Any], expected: str) -> None:
    class Wrong(Lookup):
        async def step(self, turn: AssistantTurn) -> Observation:
            return Observation(**wrong)

    with pytest.raises(UserCodeError, match=f"^returned Observation.*, expected an Observation with {expected}$"):
        await generate_with(Wrong)(ScriptedModel(says("68")), ATTEMPT, 0)


async def test_an_episode_without_end_is_cut_after_so_many_turns() -> None:
    model = ScriptedModel(says(CALL))
    sample = await generate_with(max_turns=3)(model, ATTEMPT, 0)
    assert len(model.requests) == 3
    assert (sample.finish_reason, sample.reward) == ("length", None)
    assert Lookup.made[-1].closed == 1


async def test_no_trajectory_is_longer_than_the_limits() -> None:
    whole = await generate_with()(ScriptedModel(says(CALL)), ATTEMPT, 0)
    response = whole.response_length
    for limit in (1, 3, response // 2, response - 1):
        for limits in (Limits(response=limit, total=10_000), Limits(response=9999, total=whole.prompt_length + limit)):
            cut = await generate_with(limits=limits)(ScriptedModel(says(CALL)), ATTEMPT, 0)
            assert cut.response_length <= limit
            assert cut.finish_reason == "length"
            assert cut.tokens.tolist() == whole.tokens[: len(cut.tokens)].tolist()
    short = await generate_with(limits=Limits(response=9999, total=9999, turn=2))(
        ScriptedModel(says("a b c")), ATTEMPT, 0
    )
    assert short.loss_mask.sum() == 2


async def test_a_prompt_that_leaves_no_room_is_its_own_fault() -> None:
    with pytest.raises(NoRoomError, match="--max-tokens-per-gpu"):
        await generate_with(limits=Limits(response=10, total=5))(ScriptedModel(says("a")), ATTEMPT, 0)


async def test_another_try_has_an_environment_and_a_trajectory_of_its_own() -> None:
    # covers: M7
    def broken(call: int, input_ids: list[int]) -> Any:
        return says(CALL)(call, input_ids) if call == 0 else TransientEngineError("connection cut")

    generate = generate_with()
    with pytest.raises(TransientEngineError):
        await generate(ScriptedModel(broken), ATTEMPT, 0)
    failed = Lookup.made[-1]
    assert (len(failed.turns), failed.closed) == (1, 1)
    sample = await generate(ScriptedModel(says("68")), ATTEMPT, 0)
    assert Lookup.made[-1] is not failed
    assert CHAT.decode_all(sample.tokens).endswith("<|im_start|>assistant\n68<|im_end|>")
    assert sample.metadata["turns"] == 1


async def test_an_environment_that_hangs_is_given_up_by_name_of_the_flag() -> None:
    class Hanging(Lookup):
        async def step(self, turn: AssistantTurn) -> Observation:
            await asyncio.sleep(60)
            raise AssertionError

    with pytest.raises(OverdueError, match="--environment-timeout"):
        await generate_with(Hanging, step_timeout=0.02)(ScriptedModel(says("a")), ATTEMPT, 0)
    assert Lookup.made[-1].closed == 1


async def test_an_environment_that_cannot_connect_begins_again_when_its_service_is_back() -> None:
    # covers: C6
    failures = iter([ConnectionRefusedError("retrieval server"), TimeoutError("retrieval server")])

    class Unreachable(Lookup):
        async def step(self, turn: AssistantTurn) -> Observation:
            if failure := next(failures, None):
                raise failure
            return await super().step(turn)

    circuit = Circuit("retrieval server")
    generate = generate_with(Unreachable, service=circuit)
    sample = await circuit.call(lambda: generate(ScriptedModel(says("68")), ATTEMPT, 0))
    assert (sample.reward, circuit.failures) == (1.0, 2)
    assert [environment.closed for environment in Lookup.made[-3:]] == [1, 1, 1]


async def test_a_step_that_works_ends_the_outage_before_the_episode_does() -> None:
    # covers: C6
    circuit, open_after_step = Circuit("retrieval server"), []
    for _ in range(3):
        circuit._failed(ConnectionError("down"), counts=True)
    assert circuit.is_open

    def script(call: int, input_ids: list[int]) -> list[int]:
        open_after_step.append(circuit.is_open)
        return says(CALL, "68")(call, input_ids)

    await generate_with(service=circuit)(ScriptedModel(script), ATTEMPT, 0)
    assert open_after_step == [True, False]


@pytest.mark.parametrize("error", [None, RuntimeError("browser"), SystemExit(1), asyncio.CancelledError()])
async def test_a_close_that_hangs_or_raises_costs_no_sample(error: BaseException | None) -> None:
    # covers: C10
    class Reluctant(Lookup):
        async def close(self) -> None:
            if error is not None:
                raise error
            await asyncio.sleep(60)

    async with asyncio.timeout(50):
        sample = await generate_with(Reluctant, step_timeout=0.05)(ScriptedModel(says("68")), ATTEMPT, 0)
    assert sample.reward == 1.0


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_whatever_a_step_raises_is_an_exception(error: BaseException) -> None:
    # covers: C6
    class Leaving(Lookup):
        async def step(self, turn: AssistantTurn) -> Observation:
            raise error

    with pytest.raises(UserCodeError, match=type(error).__name__):
        await generate_with(Leaving)(ScriptedModel(says("68")), ATTEMPT, 0)
    assert Lookup.made[-1].closed == 1


async def test_a_step_that_returns_no_observation_says_so() -> None:
    class Silent(Lookup):
        async def step(self, turn: AssistantTurn) -> Observation:
            return None  # type: ignore[return-value]

    with pytest.raises(UserCodeError, match=r"^returned None, expected an Observation of a step of the environment$"):
        await generate_with(Silent)(ScriptedModel(says("68")), ATTEMPT, 0)


# ------------------------------------------------------------------------------------------------------ rewards
def rewarded(reward: float | None, finish_reason: FinishReason = "stop") -> Sample:
    return make_sample([0], reward=reward, finish_reason=finish_reason)


async def test_a_reward_that_was_given_stays_and_the_runs_own_fills_in() -> None:
    # covers: A4
    async def otherwise(prompt: Prompt, sample: Sample) -> float:
        return 0.25

    assert await GivenReward(otherwise)(PROMPT, rewarded(0.0)) == 0.0
    assert await GivenReward(otherwise)(PROMPT, rewarded(None)) == 0.25
    assert await GivenReward(otherwise)(PROMPT, rewarded(None, "length")) == 0.25
    assert await GivenReward(None)(PROMPT, rewarded(0.5, "length")) == 0.5
    assert await GivenReward(None)(PROMPT, rewarded(None, "length")) == 0.0
    with pytest.raises(RewardError, match="--rm-type"):
        await GivenReward(None)(PROMPT, rewarded(None))
    for reward in (float("nan"), 1e39):
        with pytest.raises(RewardError, match=r"p0: given by the environment or agent: reward .*: expected a finite"):
            await GivenReward(None)(PROMPT, rewarded(reward))


# -------------------------------------------------------------------------------------------------------- hooks
def load(monkeypatch: pytest.MonkeyPatch, attribute: object) -> object:
    module = types.ModuleType("own_environment")
    module.Attribute = attribute  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_environment", module)
    return load_factory("own_environment:Attribute", MakeEnvironment, Environment, "--environment-path")


def test_environments_are_checked_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(monkeypatch, Lookup) is Lookup
    assert load(monkeypatch, lambda prompt: Lookup(prompt))

    class Synchronous(Lookup):
        def step(self, turn: AssistantTurn) -> Observation:  # type: ignore[override]
            return Observation()

    class WithoutClose:
        def __init__(self, prompt: Prompt) -> None: ...

        def tools(self) -> tuple[()]:
            return ()

        async def step(self) -> Observation:
            return Observation()

    class WithoutPrompt(Lookup):
        def __init__(self) -> None: ...

    class Unfinished(Lookup, ABC):
        @abstractmethod
        def rules(self) -> str: ...

    for attribute, words in (
        (Synchronous, r"step\(\) must be `async def`"),
        (WithoutClose, r"step\(\) must take \(turn\); it has no close\(\)"),
        (WithoutPrompt, r"it must take \(prompt\)"),
        (Unfinished, r"--environment-path own_environment:Attribute: .* abstract method '?rules"),
        (7, "cannot be called"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            load(monkeypatch, attribute)
