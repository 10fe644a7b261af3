"""``judge``: a chat model says what a response is worth."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from miles_async.errors import ConfigurationError, RewardError, RewardUnavailableError
from miles_async.rewards.answers import answer_part
from miles_async.rewards.posting import ERROR_TEXT, Poster
from miles_async.types import Prompt, Sample

API_KEY = "JUDGE_API_KEY"  # environment variable

_BLANKS = re.compile(r"\{(prompt|response|answer|label)\}")
_VERDICTS = re.compile(r"(?<![\w.])(-?\d+(?:\.\d+)?)(?:\s*/\s*(\d+(?:\.\d+)?))?")


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class JudgeReward:
    """Fills in the template, asks for a chat completion, and reads its verdict: :func:`verdict`.

    Whatever fails is the judge's fault, and says nothing about the sample, unless the judge refuses the request.
    """

    def __init__(self, url: str | None, model: str, template: Path | None, timeout: float) -> None:
        """``url``: as clients of chat completions have it, ending in /v1. Raises ConfigurationError for the template.
        ``timeout``: seconds for all tries of one sample together.
        """
        self._template = None if template is None else read_template(template)
        key = os.environ.get(API_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else None
        self._server = None if url is None else Poster(f"{url.rstrip('/')}/chat/completions", timeout, headers)
        self._model = model

    async def __call__(self, prompt: Prompt, sample: Sample) -> float:
        if self._server is None or self._template is None:
            raise RewardError("no judge: give --judge-url and --judge-template")
        question = filled_in(self._template, prompt, sample)
        body = {"model": self._model, "messages": [{"role": "user", "content": question}]}
        content = await self._server.post(msgspec.json.encode(body))
        try:
            said = msgspec.json.decode(content, type=_Completion).choices[0].message.content or ""
        except (msgspec.MsgspecError, IndexError) as error:
            what = f"expected a chat completion, found {content[:ERROR_TEXT]!r} ({error})"
            raise RewardUnavailableError(f"{self._server.url}: {what}") from error
        found = verdict(said)
        if found is None:
            raise RewardUnavailableError(f"expected a number as the judge's verdict, found {said[-ERROR_TEXT:]!r}")
        return found

    async def close(self) -> None:
        """Close the connections."""
        if self._server is not None:
            await self._server.close()


def read_template(path: Path) -> str:
    """Raises ConfigurationError if it shows the judge no response."""
    try:
        template = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--judge-template {path}: cannot be read: {error}") from error
    if not {"response", "answer"} & {*_BLANKS.findall(template)}:
        raise ConfigurationError(f"--judge-template {path}: expected {{response}} or {{answer}} in it, found neither")
    return template


def filled_in(template: str, prompt: Prompt, sample: Sample) -> str:
    """All blanks at once: what stands in a response is never taken for one. Other braces stay."""
    values = {
        "prompt": prompt.text,
        "response": sample.text,
        "answer": answer_part(sample.text).strip(),
        "label": prompt.label or "",
    }
    return _BLANKS.sub(lambda blank: values[blank[1]], template)


def verdict(said: str) -> float | None:
    """The last number after the judge's thoughts, a fraction if one is written; None if there is none.

    >>> verdict("<think>2 of 3 steps hold</think>Mostly right. Score: 7/10")
    0.7
    """
    numbers = _VERDICTS.findall(answer_part(said))
    if not numbers:
        return None
    number, divisor = numbers[-1]
    if not divisor:
        return float(number)
    return float(number) / float(divisor) if float(divisor) else None
