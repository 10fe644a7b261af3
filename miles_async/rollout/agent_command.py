"""An agent that is a command (``--agent-command``), as a coroutine like any other agent.

It finds its session in OPENAI_BASE_URL and OPENAI_API_KEY, or ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, where clients
look, and the prompt as JSON on its standard input. The last line it prints may be what agents return: turns, or
[turns, reward]. All else it writes goes to a file.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from miles_async.errors import ConfigurationError, RequestRejectedError
from miles_async.rollout.wrapped_process import end, wrapped
from miles_async.runtime.files.owned_directory import OwnedDirectory, temporary_parent
from miles_async.runtime.network.keys import Secret, without_keys
from miles_async.runtime.network.proxies import without_proxies_for
from miles_async.runtime.texts import last_lines_of
from miles_async.types import Prompt

EX_TEMPFAIL = 75  # sysexits.h: not the command's fault, try again
_SHOWN = 500  # characters of its last words that go into an error
_LAST_BYTES = 1 << 20  # of its output that are looked at
_LOG_BYTES = 1 << 26  # of a log, before another one is begun


class CommandAgent:
    """Runs the command once per prompt, and ends all its processes (``process_tree.py``)."""

    def __init__(self, command: str, *, log_path: Path, api_key: Secret) -> None:
        """``api_key``: what its requests need."""
        self._command = wrapped(command_words(command))
        self._log_path = log_path
        self._api_key = api_key
        self._temporary: OwnedDirectory | None = None

    async def __call__(self, base_url: str, prompt: Prompt) -> Any:
        """Run the command and return its result, None if it wrote none.

        Raises RequestRejectedError with its last words if it fails, ConnectionError if it wants to be run again.
        """
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        if self._log_path.exists() and self._log_path.stat().st_size > _LOG_BYTES:
            self._log_path.replace(f"{self._log_path}.1")  # commands that have it open still write there
        # Its output goes to a file: a pipe ends when the last process that holds it does, which may be none of ours.
        if self._temporary is None:
            self._temporary = OwnedDirectory(temporary_parent(), mode=0o700)
        temporary = tempfile.mkdtemp(prefix="", dir=self._temporary.path)
        with self._log_path.open("ab") as log, tempfile.TemporaryFile() as output:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=log,
                env={**_environment(base_url, self._api_key), "TMPDIR": temporary},
                start_new_session=True,
            )
            try:
                await process.communicate(prompt_json(prompt))
            finally:
                await end(process)
                await asyncio.to_thread(shutil.rmtree, temporary, ignore_errors=True)
            lines = last_lines_of(output, _LAST_BYTES)
        if process.returncode == EX_TEMPFAIL:
            raise ConnectionError(f"the agent ended with status {EX_TEMPFAIL}: a temporary failure")
        if process.returncode != 0:
            last = "\n".join(lines)[-_SHOWN:]
            raise RequestRejectedError(f"the agent ended with status {process.returncode} ({self._log_path}): {last}")
        with suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(lines[-1]) if lines else None
        return None


def command_words(command: str, flag: str = "--agent-command") -> list[str]:
    """Split the command of a flag into its program and arguments. Raises ConfigurationError if there is no such program
    here.
    """
    program, *arguments = shlex.split(command)
    if program in ("python", "python3"):
        program = sys.executable
    if shutil.which(program) is None:
        raise ConfigurationError(
            f"{flag} {command}: there is no program {program!r} in PATH or at that path. No shell reads the "
            "command; where it needs one, give sh -c '...'"
        )
    return [program, *arguments]


def _environment(base_url: str, api_key: Secret) -> dict[str, str]:
    """Our environment without the run's keys, plus the session's address and key, reached without a proxy."""
    direct = without_proxies_for([urlsplit(base_url).hostname or ""], os.environ)
    key = api_key.reveal()
    session = {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),  # to which its clients add /v1
        "ANTHROPIC_API_KEY": key,
    }
    ours = without_keys(os.environ)
    ours.pop("ANTHROPIC_AUTH_TOKEN", None)  # clients would send this instead
    return {**ours, **direct, **session}


def prompt_json(prompt: Prompt) -> bytes:
    """Encode the prompt as the command reads it."""
    return msgspec.json.encode(
        {
            "prompt_id": prompt.prompt_id,
            "messages": prompt.messages,
            "text": prompt.text,
            "label": prompt.label,
            "metadata": prompt.metadata,
        }
    )
