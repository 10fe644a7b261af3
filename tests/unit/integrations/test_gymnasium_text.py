"""Environments of Gymnasium: which are taken, and what becomes of those that misbehave."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import gymnasium
import pytest
from gymnasium.spaces import Text

from miles_async.errors import ConfigurationError, OverdueError, UserCodeError
from miles_async.integrations.gymnasium_text import GymnasiumText
from miles_async.types import Prompt
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.turns import thought
from tests.unit.rollout.test_multi_turn import ATTEMPT, generate_with, says
from tests.waiting import until

WORDS = Text(40, min_length=0, charset="abcdefghijklmnopqrstuvwxyz0123456789 ")


class Echo(gymnasium.Env[str, str]):
    """Says ``begin`` and its seed, then the action again; done at ``stop``. One tenth per step."""

    observation_space = action_space = WORDS
    closed: ClassVar[list[Echo]] = []

    def __init__(self, begin: str = "begin", does: str = "") -> None:
        self.begin, self.does = begin, does

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return f"{self.begin} {os.urandom(4).hex() if self.does == 'unseeded' else seed}", {}

    def step(self, action: str) -> Any:
        match self.does:
            case "raise":
                raise ZeroDivisionError("of the environment")
            case "exit":
                sys.exit("of the environment")
            case "hang":
                time.sleep(600)
            case "fork":
                if os.fork() == 0:
                    os._exit(0)
                os.wait()
            case "number":
                return 7, 0.1, False, False, {}
            case "words":
                return action, "much", False, False, {}
            case "infinite":
                return action, float("inf"), False, False, {}
            case "short":
                return action, 0.1
        return action, 0.1, action == "stop", action == "cut", {}

    def close(self) -> None:
        self.closed.append(self)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    gymnasium.register("Echo-v0", entry_point=Echo)
    Echo.closed.clear()
    yield
    del gymnasium.registry["Echo-v0"]


def prompt(**metadata: object) -> Prompt:
    return Prompt(prompt_id="p", token_ids=(1,), text="begin 3", metadata={"seed": 3, **metadata})


def test_prompts_are_first_observations_of_seeds() -> None:
    assert [*GymnasiumText("Echo-v0", {"begin": "go"}).rows(2, 5)] == [
        {"prompt": "go 5", "metadata": {"seed": 5}},
        {"prompt": "go 6", "metadata": {"seed": 6}},
    ]
    assert len(Echo.closed) == 2  # one that was looked at, one that made the rows


async def test_rewards_of_steps_add_up_until_the_environment_ends() -> None:
    episode = GymnasiumText("Echo-v0", {})(prompt())
    observed = await episode.step(thought("hello"))
    assert observed.messages == ({"role": "user", "content": "hello"},)
    assert (observed.done, observed.reward) == (False, 0.1)
    told = await episode.step(thought("Hello!"))  # not in the space
    assert told.messages[0]["content"].startswith("Not an action: expected Text(0, 40, charset= 0123456789abc")
    assert (told.done, told.reward, told.metrics) == (False, 0.1, {"invalid_actions": 1.0})
    last = await episode.step(thought("stop"))
    assert (last.done, last.reward, last.metrics) == (True, 0.2, {"invalid_actions": 0.0})
    assert (await GymnasiumText("Echo-v0", {})(prompt()).step(thought("cut"))).done
    Echo.closed.clear()
    await episode.close()
    assert len(Echo.closed) == 1


@pytest.mark.parametrize(
    ("does", "problem"),
    [
        ("unseeded", r"reset\(seed=3\) began with another observation than the prompt's"),
        ("number", r"returned \(7, 0.1, False, False, {}\), expected a text, a reward"),
        ("words", "returned 'much', expected a number as the reward"),
        ("infinite", "returned inf, expected a finite reward"),
        ("short", r"returned \('a', 0.1\), expected a text"),
    ],
)
async def test_nonsense_costs_the_attempt(does: str, problem: str) -> None:
    episode = GymnasiumText("Echo-v0", {"does": does})(prompt())
    with pytest.raises(UserCodeError, match=problem):
        await episode.step(thought("a"))
    await episode.close()
    assert len(Echo.closed) == 2


async def test_a_prompt_without_a_seed_is_refused_by_the_flag_that_lacks() -> None:
    with pytest.raises(UserCodeError, match=r"seed in the prompt's metadata \(--metadata-key\), found None"):
        await GymnasiumText("Echo-v0", {})(prompt(seed=None)).step(thought("a"))


@pytest.mark.parametrize(
    ("does", "error"), [("raise", ZeroDivisionError), ("exit", UserCodeError), ("hang", OverdueError)]
)
async def test_an_environment_that_raises_exits_or_hangs_costs_its_attempt(does: str, error: type[Exception]) -> None:
    generate = generate_with(lambda given: GymnasiumText("Echo-v0", {"does": does})(prompt()), step_timeout=0.5)
    with pytest.raises(error):
        await generate(ScriptedModel(says("a")), ATTEMPT, 0)
    assert Echo.closed
    sample = await generate_with(lambda given: GymnasiumText("Echo-v0", {})(prompt()))(
        ScriptedModel(says("stop")), ATTEMPT, 0
    )
    assert sample.reward == 0.1  # others go on


async def test_an_environment_that_is_made_after_its_step_was_given_up_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    maker, go_on = GymnasiumText("Echo-v0", {}), threading.Event()
    Echo.closed.clear()
    make = maker.make
    monkeypatch.setattr(maker, "make", lambda: go_on.wait() and make())
    episode = maker(prompt())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(episode.step(thought("a")), 0.05)
    await episode.close()
    assert not Echo.closed
    go_on.set()
    await until(lambda: Echo.closed)


async def test_an_environment_may_fork() -> None:
    episode = GymnasiumText("Echo-v0", {"does": "fork"})(prompt())
    assert (await asyncio.wait_for(episode.step(thought("a")), 20)).reward == 0.1


@pytest.mark.parametrize(
    ("name", "config", "problem"),
    [
        ("FrozenLake-v1", {}, "expected Text as observation space, found Discrete(16): a gymnasium.Wrapper"),
        ("NoSuch-v0", {}, "NameNotFound: Environment `NoSuch` doesn't exist"),
        ("no_such_module:Echo-v0", {}, "No module named 'no_such_module'"),
        ("Echo-v0", {"colour": "red"}, "unexpected keyword argument 'colour'"),
    ],
)
def test_what_is_no_text_or_cannot_be_made_is_refused_by_name(
    name: str, config: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        GymnasiumText(name, config)
    assert problem in str(refused.value)
