"""Makes the model in ``model/`` again, with plain torch: two and a half minutes on one core. From the repository root:

python -m examples.tool_model.warm_start
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from examples.quickstart.tasks import ModelSize
from examples.quickstart.tokenizer import PAD_ID, build_tokenizer
from examples.quickstart.warm_start import IGNORED, build_model, train_supervised
from examples.tool_model.dialogues import TASKS, MakeDialogue

MODEL = Path(__file__).parent / "model"
SIZE = ModelSize(hidden=128, layers=2, heads=4, key_value_heads=2, head_dim=32, ffn=256)
TOOL_SHARE = 0.4  # of the dialogues in which a tool is used
STEPS = 600
BATCH = 48
LR = 2e-3
SEED = 7


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


@torch.no_grad()
def shares_as_taught(model: Qwen3ForCausalLM, task: MakeDialogue) -> list[float]:
    """For each turn of a dialogue with tools: how often the model, sampled, says what it was taught, given the turns
    before. The first is how often it uses the tool at all.
    """
    torch.manual_seed(0)
    random_ = random.Random(0)
    turns = [task(random_, True).turns() for _ in range(128)]
    return [_share(model, of_dialogues) for of_dialogues in zip(*turns, strict=True)]


def _share(model: Qwen3ForCausalLM, turns: Sequence[tuple[list[int], list[int]]]) -> float:
    longest = max(len(context) for context, _ in turns)
    prompts = torch.tensor([[PAD_ID] * (longest - len(context)) + context for context, _ in turns])
    new_tokens = max(len(said) for _, said in turns)
    output = model.generate(
        prompts, attention_mask=(prompts != PAD_ID).long(), max_new_tokens=new_tokens, do_sample=True, top_k=0
    )
    answers = output[:, longest:].tolist()
    return sum(answer[: len(said)] == said for answer, (_, said) in zip(answers, turns, strict=True)) / len(turns)


def main() -> None:
    torch.set_num_threads(1)  # a model this small only loses by sharing its work
    model = train_supervised(build_model(SIZE, SEED), batches(), steps=STEPS, lr=LR)
    model.save_pretrained(MODEL)
    build_tokenizer().save_pretrained(MODEL)
    for task in TASKS:
        shares = " ".join(f"{share:.2f}" for share in shares_as_taught(model, task))
        print(f"{task.__name__}: turns said as taught {shares}")
    print(f"saved to {MODEL}")


if __name__ == "__main__":
    main()
