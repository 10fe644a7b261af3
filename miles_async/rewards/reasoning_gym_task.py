"""``reasoning_gym``: the task of reasoning-gym that made the row scores the answer (arXiv:2505.24760)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache

from miles_async.errors import RewardError
from miles_async.rewards.answers import TAGS, answer_part
from miles_async.rewards.confinement import confine
from miles_async.rewards.sandbox import Level
from miles_async.rewards.workers import WorkerPool
from miles_async.types import JsonObject, Prompt, Sample


async def reasoning_gym_reward(
    workers: WorkerPool, level: Callable[[], Level], prompt: Prompt, sample: Sample
) -> float:
    """The task's own score, 0 to 1. Its name is ``source_dataset`` in the metadata, as reasoning-gym writes it.

    ``workers``: of this reward alone, since some tasks evaluate the answer as Python: they are confined.
    """
    task = prompt.metadata.get("source_dataset")
    if not isinstance(task, str):
        raise RewardError(f"prompt {prompt.prompt_id}: its metadata names no task (source_dataset)")
    entry = {"question": prompt.text, "answer": prompt.label, "metadata": prompt.metadata}
    arguments = (task, final_answer(sample.text), entry, level())
    return float(await workers.call(score, *arguments, needs=["reasoning_gym"]))


def final_answer(response: str) -> str:
    """Return the text of the last ``<answer>`` tags behind the thoughts; without tags, everything there."""
    part = answer_part(response)
    tagged = TAGS.findall(part)
    return str(tagged[-1] if tagged else part).strip()


def score(task: str, answer: str, entry: JsonObject, level: Level) -> float:
    """Score in the worker: tasks run their own code, such as solvers."""
    import reasoning_gym

    if level != "off":
        _confine_once(level)
    return float(reasoning_gym.get_score_answer_fn(task)(answer, entry))


@cache
def _confine_once(level: Level) -> None:
    packages = [folder for folder in sys.path if folder.endswith("-packages")]  # modules that tasks import late
    confine(readable=packages if level == "landlock" else None)
