"""``--environment verifiers:NAME``: tasks of PrimeIntellect's verifiers, whose harnesses talk to the model in sessions.

Verifiers and SGLang need different versions of the same packages, so it runs in a separate Python: one process
(``verifiers_host.py``) for all episodes of the run, which is an agent to the run.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec

from miles_async.errors import ConfigurationError, RequestRejectedError, TransientEngineError
from miles_async.rollout.wrapped_process import end, wrapped
from miles_async.runtime.network.keys import Secret, without_keys
from miles_async.runtime.texts import last_lines
from miles_async.types import JsonObject, Prompt, Sample

ROLLOUT = "rollout"  # in a sample's ``agent_turns``: by which the process knows it
HOST = Path(__file__).with_name("verifiers_host.py")
_END_SECONDS = 15.0  # for episodes to be cancelled and what they started to be ended
_LONGEST_LINE = 1 << 26  # bytes
_LAST_BYTES = 1 << 16  # of the log, for its last line


def host_environment(python: str) -> dict[str, str]:
    """Our variables without the run's keys; commands, such as uv, are looked up next to ``python``, and modules in the
    working directory.
    """
    path = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)])
    modules = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    return {**without_keys(os.environ), "PATH": path, "PYTHONPATH": modules}


class VerifiersEpisodes:
    """The process that plays, as a service of the run and its agent. The next episode starts it again if it ended."""

    def __init__(
        self,
        python: str,
        name: str,
        config: Mapping[str, object],
        *,
        api_key: Secret,
        log_path: Path,
        start_timeout: float,
    ) -> None:
        """``name``, ``config``: of the environment, for verifiers. ``start_timeout``: seconds."""
        self._command = wrapped((python, str(HOST), "play", name, msgspec.json.encode(config).decode()))
        self._environment = {**host_environment(python), "OPENAI_API_KEY": api_key.reveal()}
        self._log_path = log_path
        self._start_timeout = start_timeout
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[JsonObject]] = {}

    async def start(self) -> None:
        """Raises ConfigurationError if the process does not come up."""
        try:
            await self._running()
        except ConnectionError as error:
            raise ConfigurationError(f"--environment: {error}") from error

    async def supervise(self) -> None:
        """Nothing to do: the next episode starts the process again."""

    async def stop(self) -> None:
        """End the process and all that it started."""
        if (process := self._process) is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await process.wait()
        await end(process)
        if self._reader is not None:
            await self._reader

    async def __call__(self, base_url: str, prompt: Prompt) -> tuple[object, float | None]:
        """Play the prompt's task; return turns and reward, as agents do: for one whose group is rewarded, its
        turns with the name under which it is kept, and None.

        Raises ConnectionError if the process ends meanwhile or verifiers reports a service that is down,
        RequestRejectedError for any other failure that it reports.
        """
        if not isinstance(task := prompt.metadata.get("task"), Mapping):
            raise RequestRejectedError("expected a task of verifiers in the prompt's metadata (--metadata-key)")
        reply = await self._ask({"task": task, "base_url": base_url})
        if (rollout := reply.get("rollout")) is not None:
            return {"turns": int(reply["turns"]), ROLLOUT: rollout}, None
        return int(reply["turns"]), float(reply["reward"])

    async def reward_group(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[float]:
        """Return the rewards of a prompt's samples: their own, or verifiers' for their group.

        Raises as playing does, and TransientEngineError if the process that played them has ended.
        """
        turns = [sample.metadata.get("agent_turns") for sample in samples]
        rollouts = [each[ROLLOUT] for each in turns if isinstance(each, Mapping)]
        if not rollouts:
            return [cast("float", sample.reward) for sample in samples]  # played, so it has one
        reply = await self._ask({"rollouts": rollouts})
        return [float(reward) for reward in reply["rewards"]]

    async def _ask(self, message: JsonObject) -> JsonObject:
        """The process's answer. Raises as :meth:`__call__` does."""
        process, number = await self._running(), next(self._numbers)
        self._waiting[number] = answer = asyncio.get_running_loop().create_future()
        try:
            self._send(process, {"id": number, **message})
            reply = await answer
        except asyncio.CancelledError:
            self._send(process, {"id": number})
            raise
        finally:
            del self._waiting[number]
        if "error" in reply:
            kinds = {"down": ConnectionError, "lost": TransientEngineError}
            failure = next((kind for key, kind in kinds.items() if reply.get(key)), RequestRejectedError)
            raise failure(f"verifiers: {reply['error']}")
        return reply

    def _send(self, process: asyncio.subprocess.Process, message: JsonObject) -> None:
        assert process.stdin is not None
        if not process.stdin.is_closing():
            process.stdin.write(msgspec.json.encode(message) + b"\n")

    async def _running(self) -> asyncio.subprocess.Process:
        """The process, started if there is none. Raises ConnectionError."""
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return self._process
            if self._reader is not None:
                await asyncio.wait([self._reader])  # it ends the episodes of the process before
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            with self._log_path.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    env=self._environment,
                    limit=_LONGEST_LINE,
                    start_new_session=True,
                )
            assert process.stdout is not None
            ready = b""
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._start_timeout):
                        ready = await process.stdout.readline()
            finally:
                if not ready:  # too late, ended, or cancelled with the episode that started it
                    await end(process)
            if not ready:
                raise ConnectionError(f"the process of verifiers did not come up: {_last_line(self._log_path)}")
            self._process = process
            self._reader = asyncio.create_task(self._read(process, process.stdout))
            return process

    async def _read(self, process: asyncio.subprocess.Process, answers: asyncio.StreamReader) -> None:
        """Pass answers on; at their end, end the process and the episodes that wait for it."""
        problem = "ended"
        try:
            while line := await answers.readline():
                reply = msgspec.json.decode(line, type=dict[str, Any])
                if (waiting := self._waiting.get(reply["id"])) is not None and not waiting.done():
                    waiting.set_result(reply)
        except Exception as error:  # supervision point: a line that is not an answer, or is too long
            problem = f"wrote a line that is not an answer ({error!r})"
        finally:
            await end(process)
            lost = ConnectionError(f"the process of verifiers {problem}: {_last_line(self._log_path)}")
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(lost)


def _last_line(log: Path) -> str:
    lines = last_lines(log, _LAST_BYTES)
    return f"{lines[-1][:500] if lines else 'it wrote nothing'} ({log})"
