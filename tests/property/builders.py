"""Small samples, attempts and groups for tests of the pure packages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from miles_async.staleness.versions import group_of
from miles_async.train_data.batch import BranchTable
from miles_async.train_data.batch_maker import BatchMaker
from miles_async.types import NO_VERSION, Attempt, Branch, FinishReason, Generation, Group, Prompt, Sample, TrainShard


def make_prompt(prompt_id: str = "prompts.jsonl:0") -> Prompt:
    return Prompt(prompt_id=prompt_id, token_ids=(1, 2), text="rev 12", label="21")


def make_attempt(attempt_id: int = 0, prompt_id: str | None = None, issued_version: int = 0) -> Attempt:
    prompt = make_prompt(f"prompts.jsonl:{attempt_id}" if prompt_id is None else prompt_id)
    return Attempt(attempt_id=attempt_id, prompt=prompt, epoch=0, issued_version=issued_version)


def make_sample(
    versions: Sequence[int],
    *,
    prompt_length: int = 2,
    reward: float | None = 1.0,
    finish_reason: FinishReason = "stop",
    first_token: int = 0,
    text: str = "21",
    more_branches: Sequence[Sequence[int]] = (),
) -> Sample:
    """A sample with one sampled token per entry of ``versions``; NO_VERSION entries are tool output.

    Tokens count up from ``first_token``, so that every token of a batch can be told from all others.
    """
    branch = _make_branch(versions, prompt_length, first_token)
    more: list[Branch] = []
    for of_branch in more_branches:
        more.append(_make_branch(of_branch, prompt_length, int([branch, *more][-1].tokens[-1]) + 1))
    return Sample(
        **msgspec.structs.asdict(branch),
        text=text,
        finish_reason=finish_reason,
        reward=reward,
        more_branches=tuple(more),
    )


def _make_branch(versions: Sequence[int], prompt_length: int, first_token: int) -> Branch:
    length = prompt_length + len(versions)
    tokens = np.arange(first_token, first_token + length, dtype=np.int32)
    weight_versions = np.array([NO_VERSION] * prompt_length + list(versions), dtype=np.int32)
    loss_mask = (weight_versions != NO_VERSION).astype(np.uint8)
    return Branch(
        tokens=tokens,
        prompt_length=prompt_length,
        loss_mask=loss_mask,
        rollout_logprobs=(-0.25 * tokens * loss_mask).astype(np.float32),
        weight_versions=weight_versions,
        routed_experts=np.stack([tokens % 251, tokens // 251], axis=1).astype(np.uint8),
    )


def make_generation(
    tokens: Sequence[int], version: int = 0, finish_reason: FinishReason = "stop", **fields: Any
) -> Generation:
    """The answer to one call, all of it by weights of ``version``."""
    return Generation(
        output_ids=np.array(tokens, np.int32),
        logprobs=np.full(len(tokens), -0.5, np.float32),
        weight_versions=np.full(len(tokens), version, np.int32),
        finish_reason=finish_reason,
        **fields,
    )


def make_group(
    attempt: Attempt | int, versions: Sequence[Sequence[int]] = ((0,), (0,)), rewards: Sequence[float] | None = None
) -> Group:
    """A group with one sample per entry of ``versions``. ``rewards``: one per sample; None: all are 1."""
    if isinstance(attempt, int):
        attempt = make_attempt(attempt)
    rewards = [1.0] * len(versions) if rewards is None else rewards
    samples = [make_sample(of_sample, reward=reward) for of_sample, reward in zip(versions, rewards, strict=True)]
    return group_of(attempt, samples)


def split(
    table: BranchTable,
    dp_size: int,
    max_tokens: int,
    target_version: int,
    *,
    optimizer_steps: int = 1,
    quadratic_work: float = 0.0,
    share_prefixes: bool = False,
) -> tuple[TrainShard, ...]:
    """The shards of a table, as a run with these settings makes them."""
    maker = BatchMaker(
        estimator=lambda groups: np.zeros(0, np.float32),
        dp_size=dp_size,
        max_tokens=max_tokens,
        quadratic_work=quadratic_work,
        optimizer_steps=optimizer_steps,
        bound=None,
        share_prefixes=share_prefixes,
    )
    return maker.split(table, target_version)
