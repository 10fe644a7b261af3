"""The reward hub, and what a user's own ``module:attr`` hook must be."""

from __future__ import annotations

import asyncio
import math
import sys
import types
from collections.abc import Awaitable, Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from msgspec import structs

from miles_async.api import Generate, GroupFilter, Reward
from miles_async.arguments import RewardArguments
from miles_async.arguments.rewards import REWARD_NAMES, parse_rm_type
from miles_async.errors import (
    ConfigurationError,
    OverdueError,
    RewardError,
    ServiceOutageError,
    ServiceUnavailableError,
)
from miles_async.rewards import guard
from miles_async.rewards.code_tests import read_tests
from miles_async.rewards.guard import GuardedGroupReward, GuardedReward
from miles_async.rewards.hub import RewardHub, resolve_group_reward, resolve_reward
from miles_async.rewards.judge import filled_in
from miles_async.rewards.math_answer import is_any_right
from miles_async.rewards.multiple_choice import multiple_choice
from miles_async.rewards.text_match import exact_match, f1
from miles_async.runtime.hooks import load_object
from miles_async.runtime.serialization import encode
from miles_async.runtime.services import Services
from miles_async.seams import PromptSource
from miles_async.types import Prompt, RewardParts, Sample, TokenRewards
from tests.unit.runtime.processes.waiting import children_with

PROMPT = Prompt(prompt_id="t:1", token_ids=(1, 2), text="rev 12", label="21")


def sample(text: str, finish_reason: str = "stop") -> Sample:
    return Sample(
        tokens=np.asarray([1, 2, 3], np.int32),
        prompt_length=2,
        loss_mask=np.asarray([0, 0, 1], np.uint8),
        rollout_logprobs=np.zeros(3, np.float32),
        weight_versions=np.asarray([-1, -1, 0], np.int32),
        text=text,
        finish_reason=finish_reason,
    )


class TestExactMatch:
    @pytest.mark.parametrize(
        ("text", "finish_reason", "reward"),
        [
            ("21", "stop", 1.0),
            (" 21\n", "stop", 1.0),
            ("12", "stop", 0.0),
            ("2 1", "stop", 0.0),
            ("", "stop", 0.0),
            ("21", "length", 0.0),  # no EOS
            ("21", "abort", 0.0),
        ],
    )
    async def test_right_answer_that_ended_by_itself(self, text: str, finish_reason: str, reward: float):
        assert await exact_match(PROMPT, sample(text, finish_reason)) == reward

    async def test_prompt_without_label_is_an_error(self):
        with pytest.raises(RewardError, match="t:1 has no label"):
            await exact_match(Prompt(prompt_id="t:1", token_ids=(1,), text="rev"), sample("21"))


class TestSeveralAnswers:
    """# covers: P8"""

    @pytest.mark.parametrize(
        ("reward", "labels", "right", "wrong"),
        [
            (exact_match, ("21", "twenty-one"), "twenty-one", "twenty"),
            (f1, ("red house", "the red one"), "red one", "blue"),
            (multiple_choice, ("A", "(c)"), "The answer is C.", "The answer is B."),
        ],
    )
    async def test_any_is_right(self, reward: Reward, labels: tuple[str, ...], right: str, wrong: str):
        prompt = structs.replace(PROMPT, label=labels)
        assert await reward(prompt, sample(right)) == 1.0
        assert await reward(prompt, sample(wrong)) == 0.0

    def test_in_mathematics_one_that_cannot_be_compared_does_not_matter_if_another_is_right(self):
        assert is_any_right("0.5", True, ["\\frac{1}{2}", ""]) is True
        assert is_any_right("0.5", True, ["1", "2"]) is False
        with pytest.raises(ValueError, match="finds no mathematics"):
            is_any_right("0.5", True, ["1", ""])

    def test_of_a_judge_and_of_code(self):
        prompt = structs.replace(PROMPT, label=("21", "XXI"))
        assert filled_in("{label}", prompt, sample("a")) == "21 or XXI"
        assert read_tests(("assert f(1) == 2", "assert f(2) == 3"), {}) == ["assert f(1) == 2", "assert f(2) == 3"]


def with_metadata(metadata: dict[str, Any]) -> Prompt:
    return structs.replace(PROMPT, metadata=deepcopy(metadata))


def gives(value: object) -> Callable[[Prompt, Sample], Awaitable[Any]]:
    """A reward that is always the same, or raises it."""

    async def reward(prompt: Prompt, sample: Sample) -> object:
        if isinstance(value, BaseException):
            raise value
        return value

    return reward


def hub_with(rm_type: str | None, **rewards: object) -> RewardHub:
    """A hub where some rewards are constants, or errors."""
    hub = RewardHub(RewardArguments(rm_type=rm_type), Services())
    hub.rewards |= {name: gives(value) for name, value in rewards.items()}
    return hub


class TestHub:
    def test_names_are_those_that_flags_may_say(self):
        assert set(RewardHub(RewardArguments(), Services()).rewards) == set(REWARD_NAMES)

    @pytest.mark.parametrize(
        ("text", "parts"),
        [
            ("math", (("math", 1.0),)),
            ("math:1.0+format:0.1", (("math", 1.0), ("format", 0.1))),
            ("f1 + format:-0.5", (("f1", 1.0), ("format", -0.5))),
            ("", ()),
        ],
    )
    def test_notation_of_sums(self, text: str, parts: tuple[tuple[str, float], ...]):
        assert parse_rm_type(text) == parts

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("maths", "--rm-type: expected one of exact_match, .* found 'maths'; did you mean math?"),
            ("math+", "--rm-type: expected one of .* found ''"),
            ("math:", "--rm-type math:: expected a number after math:, found ''"),
            ("math:nan", "--rm-type math:nan: expected a number"),
            ("math:1:2", "--rm-type math:1:2: expected a number"),
        ],
    )
    def test_malformed_sums_are_refused(self, text: str, message: str):
        with pytest.raises(ConfigurationError, match=message):
            resolve_reward(RewardArguments(rm_type=text), Services())

    async def test_a_weighted_sum(self):
        hub = hub_with("math:1.0+format:0.1+f1:-2", math=1.0, format=1.0, f1=0.25)
        given = await hub(PROMPT, sample("21"))
        assert given.reward == pytest.approx(0.6)
        assert given.parts == {"math": 1.0, "format": 1.0, "f1": 0.25}

    async def test_a_part_that_fails_is_an_error_of_the_sum_not_a_zero_in_it(self):
        hub = hub_with("math:1.0+format:0.1", math=RewardError("cannot tell"), format=1.0)
        with pytest.raises(RewardError, match="math: cannot tell"):
            await hub(PROMPT, sample("21"))

    async def test_a_part_whose_service_is_down_is_asked_again_and_the_others_are_not(self):
        hub, asked = hub_with("format:0.1+remote_rm"), []

        def part(name: str) -> Callable[[Prompt, Sample], Awaitable[float]]:
            async def reward(prompt: Prompt, sample: Sample) -> float:
                asked.append(name)
                if name == "remote_rm" and len(asked) < 3:
                    raise ServiceUnavailableError("503")
                return 1.0

            return reward

        hub.rewards |= {name: part(name) for name in ("format", "remote_rm")}
        assert (await hub(PROMPT, sample("21"))).reward == pytest.approx(1.1)
        assert asked == ["format", "remote_rm", "remote_rm"]

    async def test_a_row_may_name_its_own_reward(self):
        hub = hub_with("math", math=0.0, f1=0.5, format=1.0)
        row = with_metadata({"rm_type": "f1:2+format"})
        assert (await hub(row, sample("21"))).reward == 2.0
        assert await hub(PROMPT, sample("21")) == 0.0

    async def test_a_row_that_names_nothing_known_is_an_error_that_names_it(self):
        row = with_metadata({"rm_type": "gpqa"})
        with pytest.raises(RewardError, match=r"t:1, rm_type in its metadata: .* found 'gpqa'"):
            await hub_with("math")(row, sample("21"))
        with pytest.raises(RewardError, match="remote_rm: no server: give --rm-url"):
            await hub_with("math")(with_metadata({"rm_type": "remote_rm"}), sample("21"))

    async def test_own_reward(self, hooks: types.ModuleType):
        reward = resolve_reward(RewardArguments(custom_rm_path="own_hooks:good"), Services())
        assert await reward(PROMPT, sample("21")) == await hooks.good(PROMPT, sample("21"))

    async def test_own_reward_of_groups(self, hooks: types.ModuleType):
        reward = resolve_group_reward(RewardArguments(group_rm_path="own_hooks:of_groups"), Services())
        assert reward is not None
        assert await reward(PROMPT, [sample("21"), sample("12")]) == [0.0, 1.0]
        await reward.close()
        assert resolve_group_reward(RewardArguments(rm_type="math"), Services()) is None
        with pytest.raises(ConfigurationError, match=r"--group-rm-path own_hooks:too_few .*\(prompt, samples\)"):
            resolve_group_reward(RewardArguments(group_rm_path="own_hooks:too_few"), Services())

    def test_nothing_is_refused(self):
        with pytest.raises(ConfigurationError, match="no reward: give --rm-type"):
            resolve_reward(RewardArguments(), Services())

    async def test_closing_ends_processes_that_the_reward_started(self, hooks: types.ModuleType):
        reward = resolve_reward(RewardArguments(rm_type="math"), Services())
        assert await reward(PROMPT, sample("21")) == 1.0
        await reward.close()
        assert not children_with("miles_async.rewards.worker")

        own = resolve_reward(RewardArguments(custom_rm_path="own_hooks:Closable"), Services())
        await own.close()
        assert hooks.closed
        without = resolve_reward(RewardArguments(custom_rm_path="own_hooks:good"), Services())
        await without.close()  # it has nothing to close


class TestGuardedReward:
    """A reward that hangs, dies or talks nonsense costs one sample, not the run."""

    async def test_rewards_of_tokens_pass_if_they_can_be_trained_on(self):
        given = TokenRewards(reward=1.0, tokens=(sample("21").loss_mask.astype(np.float32),))
        assert await GuardedReward(gives(given), timeout=1.0)(PROMPT, sample("21")) is given
        short = structs.replace(given, tokens=(np.ones(1, np.float32),))
        with pytest.raises(RewardError, match="token rewards: expected one per token"):
            await GuardedReward(gives(short), timeout=1.0)(PROMPT, sample("21"))

    @pytest.mark.parametrize(
        ("given", "problem"),
        [
            (RewardParts(reward=1.0, parts={"fluent": "very"}), "^reward 'very': expected a number$"),
            (RewardParts(reward=1.0, parts={"fluent": None}), "^reward None: expected a number$"),
            (RewardParts(reward=1.0, parts={"fluent": float("nan")}), "reward nan"),
            (RewardParts(reward=1.0, parts=None), "^reward returned RewardP.*, expected RewardParts with a mapping of"),
            (RewardParts(reward=None, parts={}), "^reward None: expected a number$"),
            (TokenRewards(reward="x", tokens=(np.zeros(3, np.float32),)), "^reward 'x': expected a number$"),
            (TokenRewards(reward=1.0, tokens=None), "^reward returned Token.* with an array for each branch$"),
            *((value, "expected a finite number") for value in (math.nan, math.inf, 1e39, -1e39, 1e13)),
            (None, "^reward returned None, expected a number$"),
            ("good", "^reward returned 'good', expected a number$"),
            ((1.0, 0.5), r"^reward returned \(1.0, 0.5\), expected a number$"),
            (np.ones(2), r"^reward returned array\(\[1., 1.\]\), expected a number$"),
        ],
        ids=range(16),
    )
    async def test_a_reward_that_cannot_be_trained_on_is_shown(self, given: object, problem: str):
        """As what was returned, not as an error that code raised."""
        with pytest.raises(RewardError, match=problem):
            await GuardedReward(gives(given), timeout=1.0)(PROMPT, sample("21"))

    @pytest.mark.parametrize("value", [np.float32(0.5), np.array(0.5), "0.5"])
    async def test_what_can_be_made_a_number_is_one(self, value: object):
        assert await GuardedReward(gives(value), timeout=1.0)(PROMPT, sample("21")) == 0.5

    @pytest.mark.parametrize("name", ["tokens", "rollout_logprobs", "loss_mask", "weight_versions"])
    async def test_it_cannot_change_what_is_trained_on(self, name: str):
        async def reward(prompt: Prompt, sample: Sample) -> float:
            getattr(sample, name)[-1:] = 0
            return 1.0

        with pytest.raises(RewardError, match=r"reward raised ValueError.*read-only"):
            await GuardedReward(reward, timeout=1.0)(PROMPT, sample("21"))

    @pytest.mark.parametrize("value", [object(), 2**70, float], ids=["object", "int", "type"])
    @pytest.mark.parametrize("of", ["Sample", "Prompt"])
    @pytest.mark.parametrize("nested", [False, True])
    async def test_metadata_that_it_leaves_can_be_saved(self, nested: bool, of: str, value: object):
        """Else a checkpoint could not be written, long after."""

        async def reward(prompt: Prompt, sample: Sample) -> float:
            metadata = (sample if of == "Sample" else prompt).metadata
            changed = metadata["tests"][1] if nested else metadata
            changed["parsed"] = changed["in"] = value
            return 1.0

        before = {"in": 0, "tests": ["a", {"in": 1}]}
        written, asked = structs.replace(sample("21"), metadata=deepcopy(before)), with_metadata(before)
        place = r"\['tests'\]\[1\]\['in'\]" if nested else r"\['in'\]"
        with pytest.raises(RewardError, match=rf"^reward left a {of} whose metadata cannot be saved: {place}: "):
            await GuardedReward(reward, timeout=1.0)(asked, written)
        assert asked.metadata == before

    async def test_rewards_of_one_prompt_leave_metadata_that_can_be_saved_whatever_their_order(self):
        """The second begins with what the first left, and ends after it."""
        asked = with_metadata({"a": {"b": 1}, "c": 2})
        left, began, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def reward(prompt: Prompt, sample: Sample) -> float:
            prompt.metadata["a"]["b"] = object()
            if sample.text == "first":
                left.set()
                await began.wait()
            else:
                began.set()
                await ended.wait()
                prompt.metadata["a"]["b"] = object()
            return 1.0

        guarded = GuardedReward(reward, timeout=5.0)
        first = asyncio.create_task(guarded(asked, sample("first")))
        await left.wait()
        second = asyncio.create_task(guarded(asked, sample("second")))
        with pytest.raises(RewardError, match="cannot be saved"):
            await first
        assert asked.metadata == {"a": {"b": 1}, "c": 2}
        ended.set()
        with pytest.raises(RewardError, match="cannot be saved"):
            await second
        assert asked.metadata == {"c": 2}

    async def test_numbers_sets_and_arrays_that_it_leaves_are_saved(self):
        async def reward(prompt: Prompt, sample: Sample) -> float:
            prompt.metadata["x"].update(count=np.int64(3), seen={1}, logits=np.ones(2))
            return 1.0

        asked = with_metadata({"x": {}})
        assert await GuardedReward(reward, timeout=1.0)(asked, sample("21")) == 1.0
        assert asked.metadata["x"]["seen"] == {1}
        encode(asked.metadata)

    async def test_a_reward_that_raises_leaves_a_prompt_that_can_be_saved(self):
        """Its group may do without the sample."""

        async def reward(prompt: Prompt, sample: Sample) -> float:
            prompt.metadata["parsed"] = object()  # type: ignore[index]
            raise ValueError("no answer")

        asked = with_metadata({"a": 1})
        with pytest.raises(RewardError, match="no answer"):
            await GuardedReward(reward, timeout=1.0)(asked, sample("21"))
        assert asked.metadata == {"a": 1}

    @pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
    @pytest.mark.parametrize("name", ["tokens", "rollout_logprobs", "loss_mask", "weight_versions"])
    async def test_what_it_changes_all_the_same_is_named(self, name: str):
        """A tensor of the array is written to although the array is read-only."""

        async def reward(prompt: Prompt, sample: Sample) -> float:
            torch.from_numpy(getattr(sample, name))[-1:] = 5
            return 1.0

        async def of_group(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
            return [await reward(prompt, sample) for sample in samples]

        changed = rf"reward changed {name} of a sample in place, which is trained on: change a copy$"
        with pytest.raises(RewardError, match=f"^{changed}"):
            await GuardedReward(reward, timeout=1.0)(PROMPT, sample("21"))
        with pytest.raises(RewardError, match=f"^group {changed}"):
            await GuardedGroupReward(of_group, 1.0, Services().circuit("group reward"))(
                PROMPT, [sample("21"), sample("12")]
            )

    @pytest.mark.parametrize(
        "error", [AssertionError("no label"), asyncio.CancelledError(), SystemExit(1), KeyboardInterrupt()]
    )
    async def test_whatever_it_raises_is_a_reward_error(self, error: BaseException):
        # covers: C6
        with pytest.raises(RewardError, match=f"reward raised {type(error).__name__}"):
            await GuardedReward(gives(error), timeout=1.0)(PROMPT, sample("21"))

    @pytest.mark.parametrize("error", [ConnectionRefusedError(), TimeoutError(), aiohttp.ServerDisconnectedError()])
    async def test_while_its_service_is_down_it_is_asked_again(self, error: Exception):
        # covers: C6
        asked = 0

        async def reward(prompt: Prompt, sample: Sample) -> float:
            nonlocal asked
            asked += 1
            if asked < 3:
                raise error
            return 1.0

        assert await GuardedReward(reward, 1.0, Services().circuit("mine"))(PROMPT, sample("21")) == 1.0
        assert asked == 3

    async def test_an_outage_that_does_not_end_is_no_reward_error(self):
        # covers: C10
        circuit = Services(outage_timeout=0.1).circuit("mine")
        with pytest.raises(ServiceOutageError, match="expected mine to be back"):
            await GuardedReward(gives(ConnectionRefusedError()), 1.0, circuit)(PROMPT, sample("21"))

    async def test_a_close_that_hangs_or_fails_does_not_keep_the_run(self, monkeypatch: pytest.MonkeyPatch):
        # covers: C10
        class Reluctant:
            async def __call__(self, prompt: Prompt, sample: Sample) -> float:
                return 1.0

            async def close(self) -> None:
                await asyncio.sleep(60)

        class Failing(Reluctant):
            async def close(self) -> None:
                raise ValueError("nothing to close")

        monkeypatch.setattr(guard, "CLOSE_SECONDS", 0.02)
        async with asyncio.timeout(50):
            await GuardedReward(Reluctant(), timeout=1.0).close()
            await GuardedReward(Failing(), timeout=1.0).close()

    async def test_it_takes_bounded_time(self):
        async def reward(prompt: Prompt, sample: Sample) -> float:
            await asyncio.sleep(60)
            return 1.0

        with pytest.raises(OverdueError, match=r"longer than --reward-timeout 0\.01 s"):
            await GuardedReward(reward, timeout=0.01)(PROMPT, sample("21"))


@pytest.fixture
def hooks() -> Iterator[types.ModuleType]:
    """An importable module of the user's."""
    module = types.ModuleType("own_hooks")
    source = """
async def good(prompt, sample): return 1.0
def not_async(prompt, sample): return 1.0
async def too_few(prompt): return 1.0
async def extra(prompt, sample, *, scale=2.0): return scale
async def of_groups(prompt, samples): return [float(n) for n, _ in enumerate(samples)]
def keep(group): return None
class Good:
    async def __call__(self, prompt, sample): return 0.5
closed = []
class Closable(Good):
    async def close(self): closed.append(True)
class NeedsArguments:
    def __init__(self, path): pass
class Leaves:
    def __init__(self): raise SystemExit(3)
class NeedsSecret:
    def __init__(self): self.key = __import__("os").environ["NO_SUCH_SECRET"]
class HasNoLength:
    def __init__(self): self.size = len(None)
class Source:
    def take(self, count): return []
    def state(self): return {}
async def slime(args, sample, **kwargs): return 1.0
async def open(*args, **kwargs): return 1.0
number = 3
"""
    exec(source, module.__dict__)
    sys.modules["own_hooks"] = module
    yield module
    del sys.modules["own_hooks"]


class TestHooks:
    @pytest.mark.parametrize("attribute", ["good", "extra", "Good", "open"])
    async def test_function_or_class_that_fits(self, hooks: types.ModuleType, attribute: str):
        reward = load_object(f"own_hooks:{attribute}", Reward, "--custom-rm-path")
        assert await reward(PROMPT, sample("21")) in (0.5, 1.0, 2.0)

    @pytest.mark.parametrize(
        ("path", "protocol", "message"),
        [
            ("own_hooks.good", Reward, "expected module:attr"),
            ("own_hooks:", Reward, "expected module:attr"),
            ("own_hookz:good", Reward, "no module 'own_hookz'; put the directory that holds it into"),
            ("own_hooks.py:good", Reward, "a module's name has no .py: own_hooks;"),
            ("own_hooks:god", Reward, "own_hooks has no 'god'; did you mean good?"),
            ("own_hooks:not_async", Reward, "is not a Reward: it must be `async def`"),
            ("own_hooks:good", GroupFilter, "it must not be `async def`; it must take (group)"),
            ("own_hooks:too_few", Reward, "it must take (prompt, sample)"),
            ("own_hooks:slime", Reward, "(prompt, sample), and takes (args, ...), as slime's hooks do: docs/"),
            ("own_hooks:good", Generate, "it must take (client, attempt, sample_index)"),
            ("own_hooks:NeedsArguments", Reward, "cannot make one without arguments"),
            ("own_hooks:number", Reward, "it cannot be called (found int)"),
            ("own_hooks:Source", PromptSource, "it has no restore()"),
        ],
    )  # fmt: skip
    def test_a_hook_that_does_not_fit_says_why(self, hooks: types.ModuleType, path: str, protocol: type, message: str):
        with pytest.raises(ConfigurationError) as caught:
            load_object(path, protocol, "--some-flag")
        assert str(caught.value).startswith(f"--some-flag {path}")
        assert message in str(caught.value)

    def test_module_that_fails_to_import_is_told_with_its_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.syspath_prepend(tmp_path)
        for name, source, place, error in [
            ("broken_hooks", "import absent_dependency\n", "broken_hooks.py:1", "No module named 'absent_dependency'"),
            ("raising_hooks", "\n1 / 0\n", "raising_hooks.py:2", "ZeroDivisionError: division by zero"),
            ("unparsed_hooks", "\n\ndef f(:\n", "unparsed_hooks.py:3", "SyntaxError: invalid syntax"),
            ("outer_hooks", "import raising_hooks\n", "raising_hooks.py:2", "ZeroDivisionError: division by zero"),
            ("misusing_hooks", "import json\njson.loads('')\n", "misusing_hooks.py:2", "JSONDecodeError: Expecting"),
        ]:
            (tmp_path / f"{name}.py").write_text(source)
            with pytest.raises(ConfigurationError) as caught:
                load_object(f"{name}:f", Reward, "--custom-rm-path")
            assert f"importing {name} failed at {tmp_path / place}: {error}" in str(caught.value)

    @pytest.mark.parametrize(("argument", "code"), [("3", "3"), ("", "None"), ("'no GPU here'", "'no GPU here'")])
    def test_module_that_ends_the_process_is_told_with_the_flag(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str, code: str
    ):
        (tmp_path / "leaving_hooks.py").write_text(f"import sys\nsys.exit({argument})\n")
        monkeypatch.syspath_prepend(tmp_path)
        expected = "^--custom-rm-path leaving_hooks:f: importing leaving_hooks failed"
        with pytest.raises(ConfigurationError, match=rf"{expected}.*leaving_hooks.py:2: it called sys.exit\({code}\)"):
            load_object("leaving_hooks:f", Reward, "--custom-rm-path")

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            (
                "def __getattr__(name):\n    import sys; sys.exit(3)\n",
                "reading f failed at .*:2: it called sys.exit.3.",
            ),
            ("def __getattr__(name):\n    1 / 0\n", "reading f failed at .*:2: ZeroDivisionError"),
            ("class Skipped(BaseException): pass\nraise Skipped('no GPU')\n", "failed at .*:2: Skipped: no GPU"),
        ],
    )
    def test_whatever_a_module_raises_is_told_with_the_flag(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
    ):
        (tmp_path / "lazy_hooks.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "lazy_hooks", raising=False)
        with pytest.raises(ConfigurationError, match=rf"--custom-rm-path lazy_hooks:f: .*{message}"):
            load_object("lazy_hooks:f", Reward, "--custom-rm-path")

    @pytest.mark.parametrize(
        ("attribute", "error"),
        [
            ("NeedsSecret", ".*KeyError: 'NO_SUCH_SECRET'"),
            ("HasNoLength", ".*TypeError: object of"),
            ("Leaves", " at .*: it called sys.exit"),
        ],
    )
    def test_class_that_raises_is_told_with_the_flag_and_the_line(
        self, hooks: types.ModuleType, attribute: str, error: str
    ):
        told = f"--custom-rm-path own_hooks:{attribute}: making one failed{error}"
        with pytest.raises(ConfigurationError, match=told):
            load_object(f"own_hooks:{attribute}", Reward, "--custom-rm-path")

    def test_the_error_of_a_module_is_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        (tmp_path / "talking_hooks.py").write_text("raise ValueError('x' * 1_000_000)\n")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ConfigurationError, match="ValueError: xxx") as caught:
            load_object("talking_hooks:f", Reward, "--custom-rm-path")
        assert len(str(caught.value)) < 5000
