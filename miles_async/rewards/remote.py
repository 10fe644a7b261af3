"""``remote_rm``: a reward model behind HTTP."""

from __future__ import annotations

import msgspec

from miles_async.errors import RewardError
from miles_async.rewards.posting import ERROR_TEXT, Poster
from miles_async.types import Prompt, Sample


class _Reward(msgspec.Struct):
    reward: float


class RemoteReward:
    """POSTs prompt, response, label and metadata as JSON; the answer is a number, or an object with ``reward``."""

    def __init__(self, url: str | None, timeout: float) -> None:
        """``timeout``: seconds for one answer."""
        self._server = Poster(url, timeout) if url is not None else None

    async def __call__(self, prompt: Prompt, sample: Sample) -> float:
        if self._server is None:
            raise RewardError("no server: give --rm-url")
        content = await self._server.post(
            msgspec.json.encode(
                {"prompt": prompt.text, "response": sample.text, "label": prompt.label, "metadata": prompt.metadata}
            )
        )
        try:
            answer = msgspec.json.decode(content, type=float | _Reward)
        except (msgspec.MsgspecError, RecursionError) as error:
            what = f"expected a number, found {content[:ERROR_TEXT]!r} ({error})"
            raise RewardError(f"{self._server.url}: {what}") from error
        return answer.reward if isinstance(answer, _Reward) else answer

    async def close(self) -> None:
        """Close the connections."""
        if self._server is not None:
            await self._server.close()
