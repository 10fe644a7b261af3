"""What the trainer must compute, written plainly: transformers, one sample at a time, torch.optim.AdamW.

Deliberately shares no code with miles_async: no packing, no parallelism, formulas spelled out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.integration.toy_batches import ToySample


class PlainTrainer:
    """GRPO with clip 0.2, optionally TIS (cap 2) and KL to the initial model (k3, coefficient ``kl``)."""

    def __init__(self, directory: Path, *, lr: float, tis: bool = False, kl: float | None = None) -> None:
        torch.set_num_threads(1)  # more threads spend their time waiting for each other: the models are tiny
        self.model = _load(directory)
        self.initial = _load(directory)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
        )
        self.tis, self.kl = tis, kl

    def logprobs(self, tokens: Sequence[int], model: Any = None) -> torch.Tensor:
        """Of tokens[1:]."""
        row = torch.tensor([list(tokens)])
        logits = (model or self.model)(row).logits[0, :-1].float()
        return torch.log_softmax(logits, -1).gather(1, row[0, 1:, None])[:, 0]

    def train(self, steps: Sequence[Sequence[ToySample]]) -> dict[str, float]:
        """One rollout step of one or more optimizer steps. Loss: over all tokens; grad norm: mean over steps."""
        with torch.no_grad():
            old = {id(sample): self.logprobs(sample.tokens) for step in steps for sample in step}
        loss_sum, token_sum, norms = 0.0, 0, []
        for step in steps:
            tokens = sum(int(sample.loss_mask.sum()) for sample in step)
            loss = sum(self._loss(sample, old[id(sample)]) for sample in step)
            self.optimizer.zero_grad()
            (loss / tokens).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)))
            self.optimizer.step()
            loss_sum, token_sum = loss_sum + loss.item(), token_sum + tokens
        return {"loss": loss_sum / token_sum, "grad_norm": sum(norms) / len(norms), "loss_tokens": token_sum}

    def _loss(self, sample: ToySample, old: torch.Tensor) -> torch.Tensor:
        mask = torch.tensor(sample.loss_mask[1:]).float()
        rollout = torch.tensor(sample.rollout_logprobs[1:])
        new = self.logprobs(sample.tokens)
        ratio = torch.exp(new - old)
        loss = -torch.min(ratio * sample.advantage, torch.clamp(ratio, 0.8, 1.2) * sample.advantage)
        if self.tis:
            loss = loss * torch.clamp(torch.exp(old - rollout), max=2.0)
        if self.kl is not None:
            with torch.no_grad():
                reference = self.logprobs(sample.tokens, self.initial)
            loss = loss + self.kl * (torch.exp(reference - new) - (reference - new) - 1)
        return (loss * mask).sum()


def _load(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
