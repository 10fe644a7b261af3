"""An agent that is a command (``--agent-command``), as a coroutine like any other agent.

It finds its session in OPENAI_BASE_URL, where clients of chat completions look, and the prompt as JSON on its standard
input. The last line it prints may be what agents return: turns, or [turns, reward]. All else it writes goes to a file.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from miles_async.errors import RequestRejectedError
from miles_async.run.proxies import without_proxies_for
from miles_async.types import Prompt

EX_TEMPFAIL = 75  # sysexits.h: not the command's fault, try again
_SHOWN = 500  # characters of its last words that go into an error


class CommandAgent:
    """Runs the command once per prompt, in a process group of its own."""

    def __init__(self, command: str, *, log_path: Path, wrapper: Sequence[str] = ()) -> None:
        """``wrapper``: in front of the command; ties it to the life of this process."""
        words = shlex.split(command)
        if words[0] in ("python", "python3"):
            words[0] = sys.executable
        self._command = (*wrapper, *words)
        self._log_path = log_path

    async def __call__(self, base_url: str, prompt: Prompt) -> Any:
        """What it says it returns, None if nothing.

        Raises RequestRejectedError with its last words if it fails, ConnectionError if it wants to be run again.
        """
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=_environment(base_url),
                start_new_session=True,
            )
        try:
            output, _ = await process.communicate(prompt_json(prompt))
        finally:
            with suppress(ProcessLookupError):  # whatever it left behind, too
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        lines = output.decode(errors="replace").strip().splitlines()
        if process.returncode == EX_TEMPFAIL:
            raise ConnectionError(f"the agent ended with status {EX_TEMPFAIL}: a temporary failure")
        if process.returncode != 0:
            last = "\n".join(lines)[-_SHOWN:]
            raise RequestRejectedError(f"the agent ended with status {process.returncode} ({self._log_path}): {last}")
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(lines[-1]) if lines else None
        return None


def _environment(base_url: str) -> dict[str, str]:
    """Ours, the session, and no proxy on the way to it."""
    direct = without_proxies_for(urlsplit(base_url).hostname or "", os.environ)
    return {"OPENAI_API_KEY": "none", **os.environ, **direct, "OPENAI_BASE_URL": base_url}


def prompt_json(prompt: Prompt) -> bytes:
    """What the command reads."""
    return msgspec.json.encode(
        {
            "prompt_id": prompt.prompt_id,
            "messages": prompt.messages,
            "text": prompt.text,
            "label": prompt.label,
            "metadata": prompt.metadata,
        }
    )
