"""Environments of verifiers 0.3 with ``load_environment``, datasets and rubrics, for ``verifiers_host.py``."""

import contextlib
import functools
import inspect
import os
import time
import uuid
from contextvars import ContextVar

import httpx
import verifiers as vf
from openai import AsyncOpenAI
from verifiers.legacy.clients.openai_chat_completions_client import OpenAIChatCompletionsClient

KEPT_SECONDS = 3600.0  # that a rollout waits for its group, which may have been given up
TOO_LONG = "prompt is too long"  # what sessions answer when there is no room for another turn: the episode is cut
_OWN = vf.EmptyModelResponseError  # not a failure: a policy may answer nothing

_raised: ContextVar[list] = ContextVar("_raised")  # by rewards of the episode


class ClassicEnvironment:
    """One environment, whose own loop plays the episodes."""

    def __init__(self, name, config):
        """``config``: arguments of ``load_environment``. Raises NotImplementedError for what cannot be trained."""
        self._environment = environment = vf.load_environment(name, **config)
        self._grouped = any(rubric.has_group_rewards for rubric in _rubrics(environment))
        self._kept: dict[str, tuple[float, dict]] = {}  # rollout → when it ended, state; oldest first
        if any(isinstance(each, vf.EnvGroup) for each in getattr(environment, "envs", ())):
            raise NotImplementedError(f"{name} is an EnvGroup of EnvGroups, whose rewards verifiers leaves at 0")
        if environment.message_type != "chat":
            raise NotImplementedError(f"{name} has prompts that are texts; expected messages (message_type chat)")
        for rubric in _rubrics(environment):
            rubric.funcs[:] = map(_noting, rubric.funcs)

    def rows(self, count, held_out):
        """Yield prompts of the dataset, then those to hold out: of the one for evaluation, or the next ones."""
        environment = self._environment
        trained, evaluated = environment.build_dataset(), environment.build_eval_dataset()
        if trained is None or evaluated is None:
            yield from map(_row, _first(trained if evaluated is None else evaluated, count + held_out))
            return
        if len(evaluated) < held_out:
            raise NotImplementedError(
                f"the environment's dataset for evaluation has {len(evaluated)} rows, and --environment-eval-prompts "
                f"asks for {held_out}"
            )
        yield from map(_row, _first(trained, count))
        yield from map(_row, _first(evaluated, held_out))

    @contextlib.asynccontextmanager
    async def serving(self):
        """Context in which episodes are played; the environment is torn down at its end."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        async with httpx.AsyncClient(timeout=httpx.Timeout(None, connect=30.0), limits=limits) as self._connections:
            try:
                yield
            finally:
                for rollout in [*self._kept]:
                    await self._drop(rollout)
                await self._environment._teardown()
                self._environment._teardown = _nothing  # which verifiers calls when Python ends, too

    async def play(self, task_data, base_url):
        """Return the outcome of one episode. One whose group is rewarded is kept until then."""
        environment = self._environment
        raised: list[Exception] = []
        _raised.set(raised)
        key = os.environ["OPENAI_API_KEY"]
        client = AsyncOpenAI(base_url=base_url, api_key=key, http_client=self._connections)
        state = await environment.rollout(
            task_data, OpenAIChatCompletionsClient(client), "policy", environment.sampling_args
        )
        kept = False
        try:
            error = state.get("error")
            if error is not None and not isinstance(error, _OWN) and TOO_LONG not in str(error.__cause__):
                raise error
            if kept := self._grouped:
                return {"rollout": await self._keep(state), "turns": len(state["trajectory"])}
            await environment.rubric.score_rollout(state)
        finally:
            if not kept:
                await environment.rubric.cleanup(state)
        if raised:  # verifiers has made zeros of them
            raise raised[0]
        return {"reward": state["reward"], "turns": len(state["trajectory"])}

    async def reward_group(self, rollouts):
        """Return rewards of the rollouts of a group. They are kept if that fails, so that it can be tried again."""
        rubric = self._environment.rubric
        raised: list[Exception] = []
        _raised.set(raised)
        if not self._kept.keys() >= {*rollouts}:
            return {"error": "a rollout of the group is not kept any more", "lost": True}
        states = [self._kept[rollout][1] for rollout in rollouts]
        await rubric.score_group(states)
        if raised:
            raise raised[0]
        for rollout in rollouts:
            await self._drop(rollout)
        return {"rewards": [state["reward"] for state in states]}

    async def _keep(self, state):
        now = time.monotonic()
        for rollout in [each for each, (ended, _) in self._kept.items() if ended < now - KEPT_SECONDS]:
            await self._drop(rollout)
        self._kept[rollout := uuid.uuid4().hex] = now, state
        return rollout

    async def _drop(self, rollout):
        if (kept := self._kept.pop(rollout, None)) is not None:
            await self._environment.rubric.cleanup(kept[1])


def _first(dataset, count):
    return dataset.select(range(min(count, len(dataset))))


def _row(row):
    return {"prompt": row["prompt"], "metadata": {"task": row}}


def _rubrics(environment):
    """All rubrics of the environment, including nested groups of rubrics."""
    found = [environment.rubric, *(each.rubric for each in getattr(environment, "envs", ()))]
    for rubric in found:
        found += getattr(rubric, "rubrics", ())
    return {id(rubric): rubric for rubric in found}.values()


def _noting(function):
    """The same function of a rubric, which remembers what it raises."""

    @functools.wraps(function)
    async def noting(*arguments, **named):
        try:
            result = function(*arguments, **named)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            _raised.get().append(error)
            raise

    return noting


async def _nothing():
    """Tear down what is torn down already."""
