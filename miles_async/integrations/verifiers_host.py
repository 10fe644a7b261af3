"""The other end of ``verifiers_episodes.py``, which Python with PrimeIntellect's verifiers runs as a script:

    python verifiers_host.py rows NAME CONFIG COUNT HELD_OUT   writes prompts to train and to hold out, as JSON lines
    python verifiers_host.py play NAME CONFIG                  plays the tasks that it reads, one JSON line each

That Python has no miles_async, so this file and its imports use nothing of it. Which of them depends on the
version there: ``verifiers_tasks.py`` for tasksets of 0.4, ``verifiers_classic.py`` for environments of 0.3.

A line with ``rollouts`` asks for the rewards of a group of rollouts that were played, one with neither cancels.

A task that is played talks to the model at its ``base_url``; the key is in OPENAI_API_KEY.
"""

import asyncio
import json
import os
import sys
from functools import partial
from importlib.metadata import PackageNotFoundError, version

REFUSED = 2  # exit status: the last line of standard error says why
FILES = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


def opened(name, config):
    """Load the environment. Exits with status 2 if it cannot be played here."""
    try:
        found = version("verifiers")
    except PackageNotFoundError:
        found = ""
    if found.startswith("0.4."):
        from verifiers_tasks import Tasks as Loaded
    elif found.startswith("0.3."):
        from verifiers_classic import ClassicEnvironment as Loaded
    else:
        install = f"{sys.executable} -m pip install 'verifiers>=0.4,<0.5' uv"
        refuse(f"--environment-python: expected verifiers 0.4 or 0.3, found {found or 'none'}: {install}")
    try:
        return Loaded(name, config)
    except NotImplementedError as error:
        refuse(error)


def refuse(problem):
    print(" ".join(str(problem).split()), file=sys.stderr)
    sys.exit(REFUSED)


async def play(loaded, messages, answers):
    """Play episodes and reward groups concurrently, with cancellation on request."""
    reader = asyncio.StreamReader(limit=1 << 30)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), messages)
    episodes: dict[int, asyncio.Task] = {}

    async def answer(number, work):
        try:
            # Rewards may be numpy's numbers; NaN is no JSON, and costs this episode.
            line = json.dumps({"id": number, **await work}, allow_nan=False, default=float)
        except Exception as error:
            line = json.dumps({"id": number, **failed(error)})
        print(line, file=answers, flush=True)

    def over(number, _):
        del episodes[number]

    async with loaded.serving():
        print(json.dumps({"ready": True}), file=answers, flush=True)
        while line := await reader.readline():
            message = json.loads(line)
            number = message["id"]
            if "task" in message:
                work = loaded.play(message["task"], message["base_url"])
            elif "rollouts" in message:
                work = loaded.reward_group(message["rollouts"])
            else:
                if (running := episodes.get(number)) is not None:
                    running.cancel()
                continue
            episodes[number] = asyncio.create_task(answer(number, work))
            episodes[number].add_done_callback(partial(over, number))
        left = [*episodes.values()]
        for running in left:
            running.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def failed(error):
    """Describe an episode's error, and whether a service that it needs is down: see ``runtime.services.is_outage``."""
    cause, down = error, False
    while cause is not None and not down:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        down = status >= 500 or status == 429 if status else isinstance(cause, OSError) and not isinstance(cause, FILES)
        cause = cause.__cause__ or cause.__context__
    return {"error": f"{type(error).__name__}: {error}", "down": down}


def main(words):
    what, name, config, *counts = words
    # Keep both pipes away from processes that harnesses start, and from output of packages.
    messages, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    loaded = opened(name, json.loads(config))
    if what == "play":
        asyncio.run(play(loaded, messages, answers))
        return
    with answers:
        try:
            for row in loaded.rows(*map(int, counts)):
                print(json.dumps(row, ensure_ascii=False), file=answers)
        except NotImplementedError as error:
            refuse(error)


if __name__ == "__main__":
    main(sys.argv[1:])
