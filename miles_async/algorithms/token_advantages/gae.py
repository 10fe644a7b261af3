"""Generalized advantage estimation, with the values of a critic.

Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (arXiv 1506.02438), eq. 11
and 16, and PPO (arXiv 1707.06347), eq. 11 and 12. Over the tokens t = 1 .. T of a sequence that carry loss::

    δ_t = r_t + γ · V_{t+1} - V_t,    V_{T+1} = 0
    A_t = δ_t + γ λ · A_{t+1},        A_{T+1} = 0

λ is ``--lambd``, or with ``--lambd-length-alpha`` α VAPO's (Yue et al., arXiv 2504.05118): max(0, 1 - 1 / (α · T)), by
which rewards reach back further in longer sequences; α is 0.05 there and 1.5 in SAO (arXiv 2607.07508). In both the
critic learns from λ = 1: ``--critic-lambd``.

V_t is the critic's value of the prefix that token t was sampled after. r_T is the sample's advantage as
``--advantage-estimator`` gives it (with ``reinforce`` its reward), and the other rewards are 0; where the estimator
gives one per token (``token_rewards``, or your own), r_t is the token's. With ``--kl-coef`` each r_t is less by
kl_coef · KL_t, an estimate (``--kl-reward-type``) from log π_old and log π_ref (arXiv 1909.08593, eq. 2).

The papers have no tokens of tools. Here t counts the tokens that carry loss, so a tool's answer between two turns takes
no step of γ or λ, as in verl; in slime it takes one per token. A truncated sequence ends with V_{T+1} = 0, as in both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_async.algorithms.registry import reward_kl_estimator
from miles_async.algorithms.sequences import discounted_to_go, loss_tokens, sequence_of_token
from miles_async.api import Need, TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments


class Gae:
    """``--token-advantages gae``."""

    def __init__(self, arguments: AlgorithmArguments) -> None:
        self._gamma, self._kl_coef = arguments.gamma, arguments.kl_coef
        self._lambd, self._alpha = arguments.lambd, arguments.lambd_length_alpha
        self._estimate = reward_kl_estimator(arguments)

    @property
    def needs(self) -> tuple[Need, ...]:
        return ("values", "old_logprobs", "ref_logprobs") if self._kl_coef else ("values",)

    def __call__(self, batch: TokenBatch) -> Tensor:
        tokens = batch.loss_mask.nonzero()[:, 0]
        sequence = sequence_of_token(batch.offsets)[tokens]
        last = torch.ones_like(sequence, dtype=torch.bool)
        last[:-1] = sequence[1:] != sequence[:-1]
        rewards = batch.advantages[tokens].double()
        if not batch.per_token:
            rewards = rewards * last
        if self._kl_coef:
            rewards = rewards - self._kl_coef * self._estimate(batch.old_logprobs, batch.ref_logprobs)[tokens]
        values = batch.values[tokens].double()
        following = values.roll(-1).masked_fill(last, 0.0)
        deltas = rewards + self._gamma * following - values
        advantages = discounted_to_go(deltas, sequence, self._gamma * self._lambdas(batch)[sequence])
        return torch.zeros_like(batch.advantages).index_put((tokens,), advantages.to(batch.advantages.dtype))

    def _lambdas(self, batch: TokenBatch) -> Tensor:
        """λ of each sequence, float64 [S]."""
        if self._alpha is None:
            return torch.full_like(batch.offsets[1:], self._lambd, dtype=torch.float64)
        return (1.0 - 1.0 / (self._alpha * loss_tokens(batch).double())).clamp(min=0.0)
