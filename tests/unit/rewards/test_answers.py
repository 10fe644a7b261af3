"""Rewards that compare an answer: mathematics, words, letters, formats, tasks of reasoning-gym."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import AsyncIterator
from itertools import chain, product
from pathlib import Path

import pytest

from miles_async.arguments.rewards import RewardArguments
from miles_async.errors import ConfigurationError, RewardError
from miles_async.rewards.answers import find_answer
from miles_async.rewards.hub import resolve_reward
from miles_async.rewards.math_answer import is_right, math_reward
from miles_async.rewards.multiple_choice import chosen_letter, multiple_choice
from miles_async.rewards.reasoning_gym_task import final_answer, score
from miles_async.rewards.text_match import f1, format_reward
from miles_async.rewards.workers import WorkerPool
from miles_async.runtime import packages
from miles_async.runtime.services import Services
from miles_async.types import Prompt
from tests.extras import needs
from tests.property.builders import make_sample
from tests.unit.rewards.answer_cases import LETTERS, MATH


def prompt(label: str | None, **metadata: object) -> Prompt:
    return Prompt(prompt_id="p:1", token_ids=(1,), text="", label=label, metadata=metadata)


@pytest.fixture
async def workers() -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(1, timeout=5.0)
    yield pool
    await pool.close()


# -------------------------------------------------------------------------------------------------------------- math
async def test_mathematical_answers_are_compared_by_what_they_mean(workers: WorkerPool):
    for response, label, right in [
        (r"So it is \boxed{\frac{1}{2}}.", "0.5", 1.0),
        (r"<think>\boxed{42}</think> It is \boxed{41}.", "42", 0.0),  # thoughts are not the answer
        (r"<think>\boxed{42}</think> I give up.", "42", 0.0),
        (r"[THINK]\boxed{42}[/THINK]41", "42", 0.0),
        (r"<|channel>thought\n\boxed{42}<channel|>41", "42", 0.0),
        (r"<|channel>thought\n\boxed{41}<channel|>\boxed{42}", "42", 1.0),
        (r"<|channel|>analysis<|message|>\boxed{42}<|end|><|start|>assistant<|channel|>final<|message|>41", "42", 0.0),
        ("<|channel|>analysis<|message|>41<|end|><|start|>assistant<|channel|>final<|message|>42", "42", 1.0),
        (r"\boxed{\frac{1}{}}", "42", 0.0),
    ]:
        assert await math_reward(workers, prompt(label), make_sample([0], text=response)) == right, response


def test_answers_in_the_formats_of_the_literature():
    """No false accept and no false reject."""
    judged = {
        (label, response): is_right(answer.text, answer.mark != "none", label)
        for label, responses in MATH.items()
        for response in chain(*responses)
        for answer in [find_answer(response)]
    }
    rejected = [key for label, (right, _) in MATH.items() for key in product([label], right) if not judged[key]]
    accepted = [key for label, (_, wrong) in MATH.items() for key in product([label], wrong) if judged[key]]
    assert (rejected, accepted) == ([], [])
    assert len(judged) > 140


@pytest.mark.parametrize(("letter", "response"), [(key, text) for key, texts in LETTERS.items() for text in texts])
def test_letters_in_the_formats_of_the_literature(letter: str | None, response: str):
    assert chosen_letter(response) == letter


@pytest.mark.timeout(30)
@pytest.mark.parametrize("repeated", ["the answer is ", "option ", "\n", "**", "I choose A\n"])
def test_a_response_that_repeats_itself_holds_up_nothing(repeated: str):
    """It is read on the event loop."""
    chosen_letter(repeated * 50_000)


async def test_an_undecidable_answer_is_an_error_and_the_next_one_is_judged(workers: WorkerPool):
    assert await math_reward(workers, prompt("5"), make_sample([0], text="5")) == 1.0
    with pytest.raises(RewardError, match=r"took longer than --reward-timeout 5 s"):
        await math_reward(workers, prompt("5"), make_sample([0], text=r"\boxed{10^{10^{10}}}"))
    assert await math_reward(workers, prompt("5"), make_sample([0], text="5")) == 1.0


async def test_a_label_without_mathematics_is_an_error(workers: WorkerPool):
    with pytest.raises(RewardError, match="no mathematics in the label"):
        await math_reward(workers, prompt("$$"), make_sample([0], text="5"))
    with pytest.raises(RewardError, match="p:1 has no label"):
        await math_reward(workers, prompt(None), make_sample([0], text="5"))


# ---------------------------------------------------------------------------------------------------------- F1, choice
@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("Paris", "paris.", 1.0),
        ("The city of Paris", "Paris", 0.5),  # "city of paris": precision 1/3, recall 1
        ("red red", "red", 2 / 3),  # words count as often as they occur
        ("London", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("<think>Paris Paris London</think>Paris", "Paris", 1.0),
        ("It was seen there.\n#### red house", "red house", 1.0),
    ],
)
async def test_f1_of_words(response: str, label: str, reward: float):
    assert await f1(prompt(label), make_sample([0], text=response)) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        (r"(A) is wrong. So \boxed{C}.", "C"),
        ("<think>Answer: B</think>\nC.", "C"),
        ("A good question. I cannot say.", None),
    ],
)
async def test_the_chosen_letter_is_compared_with_the_label(response: str, letter: str | None):
    for label in ("C", "(c)"):
        assert await multiple_choice(prompt(label), make_sample([0], text=response)) == float(letter == "C")
    assert await multiple_choice(prompt("B"), make_sample([0], text=response)) == 0.0


async def test_a_label_that_is_no_letter_is_an_error():
    with pytest.raises(RewardError, match="the label is 'PARIS'"):
        await multiple_choice(prompt("Paris"), make_sample([0], text="C"))


# -------------------------------------------------------------------------------------------------------------- format
@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>one,\ntwo</think>\nthree\n", 1.0),
        ("one, two</think>three", 1.0),  # templates that open the thoughts in the prompt
        ("<think>one, two</think>", 0.0),
        ("<think></think>three", 0.0),
        ("three", 0.0),
        ("<think>" * 20_000, 0.0),  # in time
        (" x</think" * 20_000, 0.0),
    ],
)
async def test_the_format_by_default_is_thoughts_and_an_answer(workers: WorkerPool, response: str, reward: float):
    found = await format_reward(workers, RewardArguments().rm_format, prompt(None), make_sample([0], text=response))
    assert found == reward


async def test_a_pattern_that_never_ends_costs_the_sample():
    workers = WorkerPool(1, timeout=0.5)
    try:
        with pytest.raises(RewardError, match="took longer"):
            await format_reward(workers, "(a+)+b", prompt(None), make_sample([0], text="a" * 50))
    finally:
        await workers.close()


# -------------------------------------------------------------------------------------------------------- reasoning-gym
REASONING_GYM = """
def get_score_answer_fn(name):
    tasks = {"chain_sum": lambda answer, entry: 1.0 if answer == entry["answer"] else 0.01}
    return (tasks | {"countdown": lambda answer, entry: eval(answer)})[name]
"""


@pytest.fixture
def reasoning_gym(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, or what we use of it where it is not installed."""
    if importlib.util.find_spec("reasoning_gym") is None:
        stand_in(tmp_path, monkeypatch)


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "reasoning_gym.py").write_text(REASONING_GYM)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.usefixtures("reasoning_gym")
async def test_the_task_of_the_row_scores_the_answer():
    reward = resolve_reward(RewardArguments(rm_type="reasoning_gym"), Services())
    row = prompt("7", source_dataset="chain_sum", expression="4 + 3")
    try:
        assert await reward(row, make_sample([0], text="<think>3 + 4</think> It is <answer>7</answer>.")) == 1.0
        assert await reward(row, make_sample([0], text="8")) < 0.1
        with pytest.raises(RewardError, match="no_such_task"):
            await reward(prompt("7", source_dataset="no_such_task"), make_sample([0], text="7"))
        with pytest.raises(RewardError, match="its metadata names no task"):
            await reward(prompt("7"), make_sample([0], text="7"))
    finally:
        await reward.close()


async def test_a_task_that_evaluates_the_answer_is_confined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stand_in(tmp_path, monkeypatch)
    secret, written = tmp_path / "secret", tmp_path / "written"
    secret.write_text("7")
    reward = resolve_reward(RewardArguments(rm_type="reasoning_gym"), Services())
    row = prompt("7", source_dataset="countdown")
    attacks = (
        f"int(open({str(secret)!r}).read())",
        f"open({str(written)!r}, 'w').write('7')",
        "__import__('socket').socket().fileno()",
        f"__import__('os').system('touch {written}') == 0 or 1 / 0",
        f"__import__('os').kill({os.getpid()}, 0) or 7",
    )
    try:
        for computed in ("2 * 3", "__import__('fractions').Fraction(12, 2)"):
            assert await reward(row, make_sample([0], text=computed)) == 6.0
        for attack in attacks:
            with pytest.raises(RewardError, match=r"ermi|ZeroDivision"):
                await reward(row, make_sample([0], text=attack))
    finally:
        await reward.close()
    assert not written.exists()


def test_the_answer_is_in_the_last_tags():
    assert final_answer("<answer>1</answer> no: <answer>\n2 </answer> done") == "2"
    assert final_answer("<think><answer></think> 3 ") == "3"
    assert final_answer("<think><answer>2</answer>?</think> <answer>3</answer>") == "3"
    assert final_answer("<think><answer>2</answer>?</think> I give up.") == "I give up."


def test_without_the_package_the_message_names_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'miles-async\[reasoning-gym\]'"):
        resolve_reward(RewardArguments(rm_type="format+reasoning_gym"), Services())


@needs("reasoning_gym")
def test_tasks_of_the_real_package_score_what_prompt_files_keep_of_them():
    import reasoning_gym as real

    for task in ("chain_sum", "countdown", "sudoku"):
        entry = json.loads(json.dumps(real.create_dataset(task, size=1, seed=1)[0]))
        assert entry["metadata"]["source_dataset"] == task
        assert score(task, entry["answer"], entry, "off") == 1.0
        assert score(task, "no", entry, "off") < 0.1
