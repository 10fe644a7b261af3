"""``judge``: a chat model grades the response."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from miles_async.arguments.rewards import parse_judge_scale
from miles_async.errors import ConfigurationError, RewardError, ServiceUnavailableError
from miles_async.rewards.answers import answer_part, labels_of
from miles_async.rewards.remote import ERROR_TEXT, Poster
from miles_async.types import Prompt, Sample

API_KEY = "JUDGE_API_KEY"  # environment variable

_BLANKS = re.compile(r"\{(prompt|response|answer|label)\}")
# A judge's last line. Strict: a number that is not the mark would be trained on.
_EMPHASIS = str.maketrans("", "", "*_`")  # Markdown's
_NUMBER = r"-?[0-9]+(?:\.[0-9]+)?"
_LABEL = r"(?:.*[^ 0-9] ?[:=])?"  # "Mark:", "Score (0-10) ="; no colon of a time or ratio
_VERDICT = re.compile(rf"{_LABEL} ?({_NUMBER})(?: ?(?:/|out of) ?({_NUMBER}))? ?\.?")
_TRIES = 3  # for a verdict that can be read: models sample


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class JudgeReward:
    """Fill in the template, ask for a chat completion, and read its verdict.

    A judge that is down says nothing about the sample. One that refuses the request, or gives no verdict in several
    tries, can't judge this sample, which is the sample's failure.
    """

    def __init__(self, url: str | None, model: str, template: Path | None, timeout: float, scale: str | None) -> None:
        """``url``: as clients of chat completions have it, ending in /v1. ``timeout``: seconds for one
        answer. ``scale``: of the judge's marks, as ``--judge-scale`` has it. Raises ConfigurationError for
        the template and the scale.
        """
        self._template = None if template is None else read_template(template)
        self._scale = None if scale is None else parse_judge_scale(scale)
        key = os.environ.get(API_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else None
        self._server = None if url is None else Poster(f"{url.rstrip('/')}/chat/completions", timeout, headers)
        self._model = model

    async def __call__(self, prompt: Prompt, sample: Sample) -> float:
        """Return the mark as a share of the scale, 0 to 1."""
        if self._server is None or self._template is None or self._scale is None:
            raise RewardError("no judge: give --judge-url, --judge-template and --judge-scale")
        question = filled_in(self._template, prompt, sample)
        body = msgspec.json.encode({"model": self._model, "messages": [{"role": "user", "content": question}]})
        low, high = self._scale
        said = ""
        for _ in range(_TRIES):
            choice = _choice(await self._server.post(body), self._server.url)
            said = choice.message.content or ""
            mark = read_verdict(answer_part(said), low, high)
            if mark is not None and choice.finish_reason != "length":  # a 1 may be a 10 that was cut
                return (mark - low) / (high - low)
        raise RewardError(
            f"expected the judge's last line to be a mark from {low:g} to {high:g} (--judge-scale), found "
            f"{said[-ERROR_TEXT:]!r}"
        )

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()


def read_template(path: Path) -> str:
    """Read the template. Raises ConfigurationError if it lacks the response."""
    try:
        template = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--judge-template {path}: cannot be read: {error}") from error
    if not {"response", "answer"} & {*_BLANKS.findall(template)}:
        raise ConfigurationError(f"--judge-template {path}: expected {{response}} or {{answer}} in it, found neither")
    return template


def filled_in(template: str, prompt: Prompt, sample: Sample) -> str:
    """Fill in all blanks at once, so that text of a response is never taken for one. Other braces stay."""
    values = {
        "prompt": prompt.text,
        "response": sample.text,
        "answer": answer_part(sample.text).strip(),
        "label": " or ".join(labels_of(prompt)) if prompt.label is not None else "",
    }
    return _BLANKS.sub(lambda blank: values[blank[1]], template)


def read_verdict(said: str, low: float, high: float) -> float | None:
    r"""Return the mark in the last line, or None if that line is anything else than a mark of this scale.

    A label before it, ``/HIGH`` or ``out of HIGH`` behind it, a full stop and Markdown's emphasis are allowed.

    >>> read_verdict("Mostly right.\nMark: **7**/10", 0, 10)
    7.0
    """
    lines = said.translate(_EMPHASIS).strip().splitlines()
    found = _VERDICT.fullmatch(" ".join(lines[-1].split())) if lines else None
    if found is None or (found[2] is not None and float(found[2]) != high):
        return None
    mark = float(found[1])
    return mark if low <= mark <= high else None


def _choice(body: bytes, url: str) -> _Choice:
    """Decode the judge's answer. Raises ServiceUnavailableError if it is not a chat completion."""
    try:
        return msgspec.json.decode(body, type=_Completion).choices[0]
    except (msgspec.MsgspecError, IndexError, RecursionError) as error:
        what = f"expected a chat completion, found {body[:ERROR_TEXT]!r} ({error})"
        raise ServiceUnavailableError(f"{url}: {what}") from error
