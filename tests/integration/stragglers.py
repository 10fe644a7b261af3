"""Generation with stragglers, for ``--custom-generate-function-path``: always the same attempts, whatever the machine.

An attempt of ``STRAGGLERS`` keeps its first sample, tokens long sampled, until engines serve newer weights.
"""

from __future__ import annotations

import asyncio

import numpy as np

from miles_async.api import EngineClient
from miles_async.arguments.rollout import RolloutArguments
from miles_async.prompts.templates import ChatTemplate
from miles_async.prompts.tokenizers import load_tokenizer
from miles_async.rollout.generate import SingleTurnGenerate, sampling_parameters
from miles_async.types import Attempt, GenerateRequest, Sample
from tests.integration.real_run import QUICKSTART

STRAGGLERS = (1, 6, 9)  # of the first twelve, which are admitted under the first two versions; retries come later
POLL_SECONDS = 0.1


class Overtaken:
    """Stragglers come when the second version after theirs is visible: too old, if one is the bound."""

    seconds = 0.0  # that a straggler is late even then

    def __init__(self) -> None:
        tokenizer = load_tokenizer(QUICKSTART / "assets" / "reverse" / "model")
        sampling = sampling_parameters(RolloutArguments(rollout_max_response_len=7))
        self._generate = SingleTurnGenerate(sampling, ChatTemplate(tokenizer, apply_chat_template=True))

    async def __call__(self, client: EngineClient, attempt: Attempt, sample_index: int) -> Sample:
        """Generate, and with a straggler wait."""
        sample = await self._generate(client, attempt, sample_index)
        if attempt.attempt_id in STRAGGLERS and sample_index == 0:
            await _until_visible(client, attempt, self.comes_under(attempt))
            await asyncio.sleep(self.seconds)
        return sample

    def comes_under(self, attempt: Attempt) -> int:
        """The version that must be visible before this straggler comes."""
        return attempt.issued_version + 2


class Late(Overtaken):
    """They come a while after the first publication, whether or not the next one is held back for them."""

    seconds = 2.0

    def comes_under(self, attempt: Attempt) -> int:
        """Not what the run may hold back until they are there."""
        return 1


async def _until_visible(client: EngineClient, attempt: Attempt, version: int) -> None:
    """The only way to learn which version is visible is to ask for a token."""
    request = GenerateRequest(
        input_ids=np.array(attempt.prompt.token_ids, np.int32), sampling={"max_new_tokens": 1}, routing_key="version"
    )
    while True:
        token = await client.generate(request)
        if token.weight_versions[-1] >= version:
            return
        await asyncio.sleep(POLL_SECONDS)
