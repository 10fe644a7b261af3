"""The other end of ``verifiers_episodes.py``, which Python with PrimeIntellect's verifiers runs as a script:

    python verifiers_host.py rows CONFIG COUNT     writes its tasks as prompts, one JSON line each
    python verifiers_host.py play CONFIG           plays the tasks that it reads, one JSON line each, to the input's end

That Python has no miles_async, so this file imports nothing of it. A task that is played talks to the model at its
``base_url``; the key is in OPENAI_API_KEY.
"""

import asyncio
import json
import sys
from functools import partial

from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_environment, load_taskset, resolve_env_config

TOO_LONG = "prompt is too long"  # what sessions answer when there is no room for another turn: the episode is cut


def rows(config, count):
    """Yield prompts: what the model is asked, and all of the task as metadata."""
    for number, task in enumerate(load_taskset(config.taskset)):
        if number == count:
            return
        data = task.data.model_dump(mode="json")
        system = [{"role": "system", "content": task.data.system_prompt}] if task.data.system_prompt else []
        messages = [*system, {"role": "user", "content": task.data.prompt_text}]
        yield {"prompt": messages, "metadata": {"task": data}}


async def play(config, answers):
    """Play episodes concurrently; an episode whose ``cancel`` is read is cancelled."""
    environment = load_environment(config)
    reader = asyncio.StreamReader(limit=1 << 30)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    episodes: dict[int, asyncio.Task] = {}

    async def episode(number, task_data, base_url):
        try:
            told = await played(environment, task_data, base_url)
        except Exception as error:
            told = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"id": number, **told}), file=answers, flush=True)

    def over(number, _):
        del episodes[number]

    async with environment.serving():
        print(json.dumps({"ready": True}), file=answers, flush=True)
        while line := await reader.readline():
            message = json.loads(line)
            number = message["id"]
            if "task" not in message:
                if (running := episodes.get(number)) is not None:
                    running.cancel()
                continue
            episodes[number] = asyncio.create_task(episode(number, message["task"], message["base_url"]))
            episodes[number].add_done_callback(partial(over, number))
        left = [*episodes.values()]
        for running in left:
            running.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def played(environment, task_data, base_url):
    task_type = type(environment.taskset).task_type()
    task = task_type(task_type.data_type().model_validate(task_data), environment.config.taskset.task)
    client = EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
    (slot,) = environment.slots(task)
    episode = await environment.run_slot(slot, ModelContext(client=client, model="policy", sampling=SamplingConfig()))
    if len(episode.traces) > 1:
        return {"error": f"{len(episode.traces)} traces in one episode: environments of several agents are unsupported"}
    failed = [error for each in (episode, *episode.traces) if (error := each.last_error) is not None]
    if failed and not (episode.traces and (episode.traces[0].ok or TOO_LONG in failed[-1].message)):
        return {"error": f"{failed[-1].type}: {failed[-1].message}"}
    (trace,) = episode.traces
    return {"reward": trace.reward, "turns": trace.num_turns}


def main(words):
    what, config, *rest = words
    answers, sys.stdout = sys.stdout, sys.stderr
    given = json.loads(config)
    given.setdefault("agent", {}).setdefault("runtime", {"type": "subprocess"})
    parsed = resolve_env_config(given)
    if what == "play":
        asyncio.run(play(parsed, answers))
        return
    for row in rows(parsed, int(rest[0])):
        print(json.dumps(row, ensure_ascii=False), file=answers)


if __name__ == "__main__":
    main(sys.argv[1:])
