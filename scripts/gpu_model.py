"""A Qwen3 of any size with random weights, a tokenizer and prompts for it, made on the spot: no download."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from examples.quickstart.tasks import ModelSize
from examples.quickstart.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS

if TYPE_CHECKING:
    from miles_async.types import Prompt, Sample

PROMPTS = 256
CONTEXT = 40_960


@dataclass(frozen=True, kw_only=True, slots=True)
class Size(ModelSize):
    """Qwen3 dimensions and the number of tokens."""

    vocabulary: int


def save_model(directory: Path, size: Size) -> int:
    """Write weights, config and tokenizer; return the number of parameters."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

    from examples.quickstart.warm_start import qwen3_config

    torch.manual_seed(0)
    config = qwen3_config(size, vocabulary=size.vocabulary, context=CONTEXT)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    words = (*SPECIAL_TOKENS, *(f"w{number}" for number in range(len(SPECIAL_TOKENS), size.vocabulary)))
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=CONTEXT,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def save_prompts(path: Path, size: Size, words: int) -> None:
    """Prompts of up to ``words`` random words."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(PROMPTS):
            chosen = (draw.randrange(len(SPECIAL_TOKENS), size.vocabulary) for _ in range(draw.randint(1, words)))
            prompt = " ".join(f"w{number}" for number in chosen)
            file.write(json.dumps({"prompt": prompt, "label": ""}) + "\n")


async def parity(prompt: Prompt, sample: Sample) -> float:
    """A Reward that random text has in half of the cases: so every group has a gradient."""
    return float(int(sample.tokens[sample.prompt_length :].sum()) % 2)
