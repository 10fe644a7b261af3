"""Makes the model in ``model/`` again, with plain torch: minutes on one core. From the repository root:

python -m examples.tool_model.warm_start
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen3ForCausalLM

from examples.quickstart.tasks import ModelSize
from examples.quickstart.tokenizer import PAD_ID, build_tokenizer
from examples.quickstart.warm_start import IGNORED, WARM_UP_STEPS, build_model
from examples.tool_model.dialogues import TASKS

MODEL = Path(__file__).parent / "model"
SIZE = ModelSize(hidden=128, layers=2, heads=4, key_value_heads=2, head_dim=32, ffn=256)
TOOL_SHARE = 0.5  # of the dialogues in which a tool is used
STEPS = 600
BATCH = 48
LR = 2e-3
SEED = 7


def train() -> Qwen3ForCausalLM:
    """AdamW, linear warm-up, linear decay to a tenth."""
    model = build_model(SIZE, SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    for step, (tokens, labels) in zip(range(STEPS), batches(), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARM_UP_STEPS) * (1 - 0.9 * step / STEPS)
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    return model.eval()


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (tokens, labels), both [batch, longest]; labels are what the assistant says."""
    random_ = random.Random(SEED)
    while True:
        rows = [random_.choice(TASKS)(random_, random_.random() < TOOL_SHARE).tokens() for _ in range(BATCH)]
        longest = max(len(ids) for ids, _ in rows)
        tokens = torch.full((BATCH, longest), PAD_ID)
        labels = torch.full((BATCH, longest), IGNORED)
        for i, (ids, said) in enumerate(rows):
            tokens[i, : len(ids)] = torch.tensor(ids)
            labels[i, : len(ids)] = torch.tensor(
                [token if by else IGNORED for token, by in zip(ids, said, strict=True)]
            )
        yield tokens, labels


def main() -> None:
    torch.set_num_threads(1)
    model = train()
    model.save_pretrained(MODEL)
    build_tokenizer().save_pretrained(MODEL)
    print(f"saved to {MODEL}")


if __name__ == "__main__":
    main()
