"""Compare a sample with what a ``ScriptedModel`` was asked to continue and said: tokens trained = tokens sampled."""

from __future__ import annotations

import numpy as np

from miles_async.prompts.templates import ChatTemplate
from miles_async.types import NO_VERSION, Sample
from tests.fakes.scripted_model import ScriptedModel


def assert_faithful(sample: Sample, model: ScriptedModel, chat: ChatTemplate) -> None:
    """One branch; every turn continues the tokens before it. Loss is on what was said, except a stop token that the
    template replaces, with its log-prob and version; nowhere else.
    """
    assert not sample.more_branches
    assert len(model.requests) == len(model.said) == sample.metadata["turns"]
    tokens, carried = sample.tokens.tolist(), np.zeros(len(sample.tokens), bool)
    starts = [*map(len, model.requests), len(tokens) + 1]
    for number, (request, said) in enumerate(zip(model.requests, model.said, strict=True)):
        assert tokens[: len(request)] == request
        kept = len(said)
        if number + 1 < len(model.said) and (said[-1] in chat.stop_ids) and tokens[len(request) + kept - 1] != said[-1]:
            kept -= 1
        assert starts[number] + kept < starts[number + 1]
        place = slice(len(request), len(request) + kept)
        assert tokens[place] == said[:kept]
        assert np.allclose(sample.rollout_logprobs[place], -(np.arange(kept) + 1) / 10)
        carried[place] = True
    assert sample.loss_mask.astype(bool).tolist() == carried.tolist()
    assert (sample.weight_versions[~carried] == NO_VERSION).all()
    assert (sample.rollout_logprobs[~carried] == 0).all()
