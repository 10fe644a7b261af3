"""A tokenizer like those of language models: byte-level BPE with 150,000 tokens, of 5.6 letters on average."""

from __future__ import annotations

import random
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from miles_async.prompts.templates import ChatTemplate

SIZE = 150_000


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """The same in every process."""
    chance = random.Random(0)
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    while len(vocabulary) < SIZE:
        letters = "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 8)))
        vocabulary.setdefault("Ġ" * (chance.random() < 0.6) + letters, len(vocabulary))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@cache
def chat() -> ChatTemplate:
    """The tokenizer as a run uses it."""
    return ChatTemplate(tokenizer(), apply_chat_template=False)
