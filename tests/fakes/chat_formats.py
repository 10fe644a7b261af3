"""Tokenizer and chat templates to test trajectories with: byte-level BPE, in the styles of several model families."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from miles_async.prompts.templates import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEMPLATES = Path(__file__).parent / "chat_templates"

STOPS = {
    "qwen3": ("<|im_end|>", "<|endoftext|>"),
    "llama3": ("<|eot_id|>", "<|eom_id|>"),
    "glm": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "mistral": ("</s>",),
    "wandering": ("</s>",),
    "qwen25_vl": ("<|im_end|>", "<|endoftext|>"),
}
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
)
VISIBLE = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>")
ORDINARY_TOKENS = 380  # ids below are neither special nor added
CORPUS = (
    "The quick brown fox jumps over the lazy dog. What is seventeen times four plus three?",
    '{"name": "search", "arguments": {"query": "the population of a town", "limit": 10}}',
    "user assistant system tool ipython\n\nresponse: 12345 67890\n  - one\n  - two\n\tthree",
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}},
        },
    }
    for name in ("search", "open_page")
]


@lru_cache
def _tokenizer(special: tuple[str, ...] = SPECIAL) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=ORDINARY_TOKENS, initial_alphabet=alphabet))
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in VISIBLE])
    return tokenizer


@lru_cache
def chat_format(style: str) -> ChatTemplate:
    """One of the styles in ``STOPS``."""
    template = (TEMPLATES / f"{style}.jinja").read_text()
    return chat_template(template, STOPS[style], "<|begin_of_text|>" if style == "llama3" else "<s>")


def chat_template(template: str, stops: Sequence[str], bos: str, special: tuple[str, ...] = SPECIAL) -> ChatTemplate:
    """Make a tokenizer with a template. ``special``: tokens that it has, ``stops`` and ``bos`` among them."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(special),
        eos_token=stops[0],
        bos_token=bos,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    stop_ids = fast.convert_tokens_to_ids(list(stops))
    with tempfile.TemporaryDirectory() as directory:
        fast.save_pretrained(directory)
        (Path(directory) / "generation_config.json").write_text(json.dumps({"eos_token_id": stop_ids}))
        chat = ChatTemplate(AutoTokenizer.from_pretrained(directory), apply_chat_template=True)
        assert chat.stop_ids == set(stop_ids)
    return chat
