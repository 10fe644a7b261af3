"""Environments of verifiers 0.3 with ``load_environment``, datasets and rubrics, for ``verifiers_host.py``."""

import contextlib
import functools
import inspect
import os
from contextvars import ContextVar

import httpx
import verifiers as vf
from openai import AsyncOpenAI
from verifiers.legacy.clients.openai_chat_completions_client import OpenAIChatCompletionsClient

TOO_LONG = "prompt is too long"  # what sessions answer when there is no room for another turn: the episode is cut
_OWN = vf.EmptyModelResponseError  # no failure of the episode: a policy may say nothing

_raised: ContextVar[list] = ContextVar("_raised")  # by rewards of the episode


class ClassicEnvironment:
    """One environment, whose own loop plays the episodes."""

    def __init__(self, name, config):
        """``config``: arguments of ``load_environment``. Raises NotImplementedError for what cannot be trained."""
        self._environment = environment = vf.load_environment(name, **config)
        if environment.requires_group_rollouts:
            raise NotImplementedError(
                f"{name} rewards whole groups; expected rewards of single rollouts: each is a session of its own here"
            )
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
                await self._environment._teardown()
                self._environment._teardown = _nothing  # which verifiers calls when Python ends, too

    async def play(self, task_data, base_url):
        """Return what became of one episode."""
        environment = self._environment
        raised: list[Exception] = []
        _raised.set(raised)
        key = os.environ["OPENAI_API_KEY"]
        client = AsyncOpenAI(base_url=base_url, api_key=key, http_client=self._connections)
        state = await environment.rollout(
            task_data, OpenAIChatCompletionsClient(client), "policy", environment.sampling_args
        )
        try:
            error = state.get("error")
            if error is not None and not isinstance(error, _OWN) and TOO_LONG not in str(error.__cause__):
                raise error
            await environment.rubric.score_rollout(state)
        finally:
            await environment.rubric.cleanup(state)
        if raised:  # verifiers has made zeros of them
            raise raised[0]
        return {"reward": state["reward"], "turns": len(state["trajectory"])}


def _first(dataset, count):
    return dataset.select(range(min(count, len(dataset))))


def _row(row):
    return {"prompt": row["prompt"], "metadata": {"task": row}}


def _rubrics(environment):
    """All rubrics of the environment, those of groups of either too."""
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
