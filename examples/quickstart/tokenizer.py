"""A 64-token tokenizer, one character per token, with a chat template that has a tool form.

Every assistant turn ends with EOS, tool calls too, so that the next turn's template reproduces the sampled
tokens exactly. The template emits ``<bos>``: never add it again when encoding a rendered prompt.
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = (
    *("<pad>", "<bos>", "<eos>", "<unk>"),
    *("<|user|>", "<|assistant|>", "<|tool|>", "<|system|>"),
    *("<call>", "</call>", "<think>", "</think>"),
)
VOCABULARY = (*SPECIAL_TOKENS, *"0123456789", *"+-*/%=()<>,.:?! ", *"abcdefghijklmnopqrstuvwxyz")
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
MODEL_MAX_LENGTH = 128

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the tasks; ``save_pretrained`` makes it loadable with ``AutoTokenizer``."""
    ids = {token: i for i, token in enumerate(VOCABULARY)}
    characters = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    characters.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=MODEL_MAX_LENGTH,
        chat_template=CHAT_TEMPLATE,
    )
