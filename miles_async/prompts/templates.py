"""Text and messages → token ids and back, with the tokenizer of ``--hf-checkpoint``. Never asks a hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from miles_async.errors import ConfigurationError


@lru_cache(maxsize=8)
def load_tokenizer(path: Path) -> Any:
    """The Hugging Face tokenizer in ``path``, loaded once per process, from local files only (M22).

    Raises ConfigurationError naming the directory.
    """
    from transformers import AutoTokenizer

    if not path.is_dir():
        raise ConfigurationError(f"--hf-checkpoint {path}: there is no such directory")
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigurationError(f"--hf-checkpoint {path}: no usable tokenizer there: {error}") from error


class ChatTemplate:
    """How prompts become tokens, and tokens text.

    >>> template = ChatTemplate(load_tokenizer(path), apply_chat_template=True)
    >>> template.encode("rev 12")  # same as [{"role": "user", "content": "rev 12"}]
    (1, 4, 55, 42, 59, 37, 13, 14, 5)
    """

    def __init__(self, tokenizer: Any, apply_chat_template: bool) -> None:
        if apply_chat_template and not tokenizer.chat_template:
            raise ConfigurationError(
                f"--apply-chat-template: the tokenizer in {tokenizer.name_or_path} has no chat template; "
                "use --no-apply-chat-template with prompts that are plain texts"
            )
        self._tokenizer = tokenizer
        self._apply_chat_template = apply_chat_template

    def encode(self, content: str | Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Token ids, ready for the engine: the turn of the assistant begins after them, <bos> occurs once."""
        if not self._apply_chat_template:
            if not isinstance(content, str):
                raise ConfigurationError("messages need the chat template: leave --no-apply-chat-template out")
            return self._encode_text(content)
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        # The template writes <bos> itself where the model wants one; nothing is added to what it renders.
        return tuple(
            self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        )

    def _encode_text(self, text: str) -> tuple[int, ...]:
        bos = self._tokenizer.bos_token
        return tuple(self._tokenizer.encode(text, add_special_tokens=not (bos and text.startswith(bos))))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a response, without special tokens and exactly as sampled otherwise."""
        text: str = self._tokenizer.decode(
            [int(token) for token in token_ids], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text
