"""Reference of the trainer's computation, written plainly: transformers, one sample at a time, torch.optim.AdamW.

Deliberately shares no code with miles_async: no packing, no parallelism, formulas spelled out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tests.integration.plain_adapters import PlainAdapters
from tests.integration.toy_batches import ToySample

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PlainTrainer:
    """GRPO with clip 0.2; optionally TIS (cap 2), KL to the initial model in the loss (k3, coefficient ``kl``) or the
    reward (k1, coefficient ``reward_kl``), and the mean over sequences of the mean over their tokens. ``entropy``:
    coefficient of the bonus, at the first step and at the eleventh. ``adapters``: train these alone, in float64.
    """

    def __init__(
        self,
        directory: Path,
        *,
        lr: float,
        tis: bool = False,
        kl: float | None = None,
        reward_kl: float | None = None,
        sequence_mean: bool = False,
        entropy: tuple[float, float] = (0.0, 0.0),
        adapters: PlainAdapters | None = None,
    ) -> None:
        torch.set_num_threads(1)  # more threads spend their time waiting for each other: the models are tiny
        dtype = torch.float32 if adapters is None else torch.float64
        self.model = _load(directory, dtype)
        self.initial = _load(directory, dtype)
        if adapters is not None:
            adapters.adapt(self.model)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
        self.entropy, self.steps = entropy, 0
        self.tis, self.kl, self.reward_kl, self.sequence_mean = tis, kl, reward_kl, sequence_mean

    def logprobs(self, tokens: Sequence[int], model: PreTrainedModel | None = None) -> torch.Tensor:
        """Of tokens[1:]."""
        row = torch.tensor([list(tokens)])
        logits = (model or self.model)(row).logits[0, :-1]
        return torch.log_softmax(logits, -1).gather(1, row[0, 1:, None])[:, 0]

    def train(self, steps: Sequence[Sequence[ToySample]]) -> dict[str, float]:
        """One rollout step of one or more optimizer steps. Loss: over all tokens; grad norm: mean over steps."""
        with torch.no_grad():
            old = {id(sample): self.logprobs(sample.tokens) for step in steps for sample in step}
            advantages = {id(sample): self._advantages(sample, old[id(sample)]) for step in steps for sample in step}
        loss_sum, count_sum, norms = 0.0, 0, []
        for step in steps:
            tokens = [int(sample.loss_mask.sum()) for sample in step]
            losses = [self._loss(sample, old[id(sample)], advantages[id(sample)]) for sample in step]
            if self.sequence_mean:
                loss, count = sum(loss / n for loss, n in zip(losses, tokens, strict=True)), len(step)
            else:
                loss, count = sum(losses), sum(tokens)
            self.optimizer.zero_grad()
            (loss / count).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.trained, 1.0)))
            self.optimizer.step()
            self.steps += 1
            loss_sum, count_sum = loss_sum + loss.item(), count_sum + count
        return {
            "loss": loss_sum / count_sum,
            "grad_norm": sum(norms) / len(norms),
            "loss_tokens": sum(int(sample.loss_mask.sum()) for step in steps for sample in step),
        }

    def _advantages(self, sample: ToySample, old: torch.Tensor) -> torch.Tensor:
        """Of tokens[1:]."""
        advantages = torch.full_like(old, sample.advantage)
        if self.reward_kl is not None:
            cost = self.reward_kl * (old - self.logprobs(sample.tokens, self.initial))
            carries_loss = torch.tensor(sample.loss_mask[1:]) == 1
            for token in range(len(advantages)):
                advantages[token] -= cost[token:][carries_loss[token:]].sum()
        return advantages

    def _loss(self, sample: ToySample, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        mask = torch.tensor(sample.loss_mask[1:]).float()
        rollout = torch.tensor(sample.rollout_logprobs[1:])
        new = self.logprobs(sample.tokens)
        ratio = torch.exp(new - old)
        loss = -torch.min(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
        if self.tis:
            loss = loss * torch.clamp(torch.exp(old - rollout), max=2.0)
        if self.kl is not None:
            with torch.no_grad():
                reference = self.logprobs(sample.tokens, self.initial)
            loss = loss + self.kl * (torch.exp(reference - new) - (reference - new) - 1)
        begin, end = self.entropy
        if begin or end:
            all_logprobs = torch.log_softmax(self.model(torch.tensor(sample.tokens)[None].long()).logits[0, :-1], -1)
            loss = loss + (begin + (end - begin) * self.steps / 10) * (all_logprobs.exp() * all_logprobs).sum(-1)
        return (loss * mask).sum()


def _load(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    import transformers

    [architecture] = json.loads((directory / "config.json").read_text())["architectures"]
    model = getattr(transformers, architecture)
    config = model.config_class.from_pretrained(directory)
    config.model_type = model.config_class.model_type  # which decides on the names of experts
    return model.from_pretrained(
        directory,
        config=config,
        dtype=dtype,
        attn_implementation="eager",  # the others leave out what is rare, such as softcapping, without a word
        experts_implementation="eager",  # takes float64
    ).train()
