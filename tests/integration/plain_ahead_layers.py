"""Reference of layers for multi-token prediction, written plainly: transformers' layers, one sample at a time, float64.

Deliberately shares no code with miles_async. The formula is that of DeepSeek-V3 (arXiv:2412.19437, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.integration.plain_reference import PlainTrainer
from tests.integration.toy_batches import ToySample


class PlainAheadTrainer(PlainTrainer):
    """GRPO as PlainTrainer has it, and ``factor`` times the cross entropy of the layers, which the policy's parameters
    get no gradient from.
    """

    def __init__(self, directory: Path, deep: Path, *, lr: float, factor: float) -> None:
        """``directory``: files of the model with its layers. ``deep``: the same as a deeper model."""
        super().__init__(deep, lr=lr)
        self.model.double()
        self.layers = self.model.config.num_hidden_layers = 2
        self.further = self.model.model.layers[2:]
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        self.parts = {
            name: torch.nn.Parameter(tensor.double())
            for name, tensor in load_file(directory / "model.safetensors").items()
            if any(name.endswith(f".{part}.weight") and name.startswith("model.layers.") for part in names)
        }
        self.factor, self.ahead_sum = factor, 0.0
        self.trained = [*self.trained, *self.parts.values()]
        self.optimizer = torch.optim.AdamW(self.trained, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)

    def train(self, steps: Sequence[Sequence[ToySample]]) -> dict[str, float]:
        self.ahead_sum = 0.0
        metrics = super().train(steps)
        return metrics | {"mtp_loss": self.ahead_sum / metrics["loss_tokens"]}

    def tensors(self, directory: Path) -> dict[str, torch.Tensor]:
        """All that is trained, by its names in the files."""
        self.model.config.num_hidden_layers += len(self.further)
        self.model.save_pretrained(directory)
        self.model.config.num_hidden_layers = self.layers
        return load_file(directory / "model.safetensors") | {
            name: part.data.clone() for name, part in self.parts.items()
        }

    def _loss(self, sample: ToySample, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        ahead = self._ahead_loss(sample)
        self.ahead_sum += ahead.item()
        return super()._loss(sample, old, advantages) + self.factor * ahead

    def _ahead_loss(self, sample: ToySample) -> torch.Tensor:
        """Mean over layers of the sum over tokens that carry loss."""
        tokens, mask = torch.tensor(sample.tokens).long(), torch.tensor(sample.loss_mask).double()
        with torch.no_grad():
            hidden = self.model.model(tokens[None]).last_hidden_state[0]
            embeddings = self.model.model.embed_tokens(tokens)
        total = torch.zeros((), dtype=torch.float64)
        for k, layer in enumerate(self.further, start=1):
            places = len(tokens) - k
            if places < 1:
                break
            x = torch.cat([self._norm(embeddings[k:], k, "enorm"), self._norm(hidden[:places], k, "hnorm")], dim=-1)
            x = x @ self._part(k, "eh_proj").T
            angles = self.model.model.rotary_emb(x, torch.arange(places)[None])
            causal = torch.full((places, places), float("-inf"), dtype=torch.float64).triu(1)[None, None]
            hidden = layer(x[None], attention_mask=causal, position_embeddings=angles)[0]
            hidden = self._norm(hidden, k, "shared_head.norm")
            logprobs = torch.log_softmax(hidden[:-1] @ self.model.lm_head.weight.detach().T, -1)
            label = tokens[k + 1 :]
            total = total - (logprobs.gather(1, label[:, None])[:, 0] * mask[k + 1 :]).sum()
        return total / len(self.further)

    def _part(self, k: int, name: str) -> torch.Tensor:
        return self.parts[f"model.layers.{self.layers - 1 + k}.{name}.weight"]

    def _norm(self, x: torch.Tensor, k: int, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self._part(k, name), self.model.config.rms_norm_eps)
