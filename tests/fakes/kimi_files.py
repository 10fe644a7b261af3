"""A model directory's tokenizer files laid out as those of Kimi-K2: byte pairs for tiktoken, and a class of its own.

The class reads ``tiktoken.model`` with tiktoken, or, where that is not installed, with a few lines that merge alike.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

from miles_async.types import Prompt, Sample

PAIRS = ("th", "he", "in", " t", "re", "on", "er", "the", " the", "an", "12", "34")  # merged in this order
BASE = 256 + len(PAIRS)
SPECIAL = {
    "[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "<|im_user|>": 3, "<|im_assistant|>": 4, "<|start_header_id|>": 6,
    "<|end_header_id|>": 7, "[EOT]": 9, "<|im_system|>": 10, "<|tool_calls_section_begin|>": 11,
    "<|im_middle|>": 17, "[UNK]": 254, "[PAD]": 255,
}  # fmt: skip
"""Name → number after ``BASE``; others are reserved."""
NOT_SPECIAL = ("<|tool_calls_section_begin|>",)  # for the tokenizer: it is part of what the model says
VOCABULARY = BASE + 256

TEMPLATE = (
    "{%- for message in messages -%}<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>{{ message.content }}"
    "<|im_end|>{%- endfor -%}{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
)

TOKENIZER = """
import os
from pathlib import Path
from shutil import copyfile

try:
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe
except ImportError:
    from . import pairs as tiktoken
    from .pairs import load_tiktoken_bpe
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.tokenization_utils import PreTrainedTokenizer

VOCAB_FILES_NAMES = {"vocab_file": "tiktoken.model"}


class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names = VOCAB_FILES_NAMES
    model_input_names = ["input_ids", "attention_mask"]
    num_reserved_special_tokens = 256
    pat_str = "|".join([r"[^\\r\\n\\p{L}\\p{N}]?\\p{L}+", r"\\p{N}{1,3}", r" ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*", r"\\s+"])

    def __init__(self, vocab_file, bos_token="[BOS]", eos_token="[EOS]", unk_token=None, pad_token=None,
                 additional_special_tokens=None, added_tokens_decoder=None, **kwargs):
        assert os.path.isfile(vocab_file), vocab_file
        names = {number: token.content for number, token in (added_tokens_decoder or {}).items()}
        self.vocab_file = vocab_file
        ranks = load_tiktoken_bpe(vocab_file)
        numbers = range(len(ranks), len(ranks) + self.num_reserved_special_tokens)
        self.special_tokens = {names.get(n, f"<|reserved_token_{n}|>"): n for n in numbers}
        self.model = tiktoken.Encoding(
            name=Path(vocab_file).name, pat_str=self.pat_str, mergeable_ranks=ranks, special_tokens=self.special_tokens
        )
        self.n_words = self.model.n_vocab
        self.unk_id = self.special_tokens[str(unk_token)]
        self.byte_encoder = bytes_to_unicode()
        self.byte_decoder = {letter: byte for byte, letter in self.byte_encoder.items()}
        self.decoder = {
            n: "".join(self.byte_encoder[byte] for byte in self.model.decode_single_token_bytes(n))
            for n in range(self.n_words)
        }
        self.encoder = {text: n for n, text in self.decoder.items()}
        super().__init__(bos_token=bos_token, eos_token=eos_token, unk_token=unk_token, pad_token=pad_token,
                         additional_special_tokens=additional_special_tokens, **kwargs)

    def encode(self, text, allow_special_tokens=True, **kwargs):
        if kwargs:
            return super().encode(text, **kwargs)
        return self.model.encode(text, allowed_special="all" if allow_special_tokens else set(), disallowed_special=())

    def decode(self, token_ids, **kwargs):
        if kwargs:
            return super().decode(token_ids, **kwargs)
        return self.model.decode([token_ids] if isinstance(token_ids, int) else token_ids)

    @property
    def vocab_size(self):
        return self.n_words

    def get_vocab(self):
        return self.encoder

    def _tokenize(self, text, **kwargs):
        return [self.decoder[n] for n in self.encode(text)]

    def _convert_token_to_id(self, token):
        return self.encoder.get(token, self.unk_id)

    def _convert_id_to_token(self, index):
        return self.decoder.get(index)

    @staticmethod
    def clean_up_tokenization(out_string):
        return out_string

    def convert_tokens_to_string(self, tokens):
        return bytearray(self.byte_decoder[letter] for letter in "".join(tokens)).decode("utf-8", "replace")

    def save_vocabulary(self, save_directory, filename_prefix=None):
        out = os.path.join(save_directory, (filename_prefix + "-" if filename_prefix else "") + "tiktoken.model")
        if os.path.abspath(self.vocab_file) != os.path.abspath(out):
            copyfile(self.vocab_file, out)
        return (out,)

    def apply_chat_template(self, conversation, tools=None, tokenize=False, add_generation_prompt=True, **kwargs):
        return super().apply_chat_template(
            conversation, tools=tools, tokenize=tokenize, add_generation_prompt=add_generation_prompt, **kwargs
        )
"""

PAIRS_CODE = '''
"""What tokenization_kimi.py uses of tiktoken."""
import base64
import re

import regex


def load_tiktoken_bpe(path):
    lines = open(path, "rb").read().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}


class Encoding:
    def __init__(self, name, *, pat_str, mergeable_ranks, special_tokens):
        self._pattern, self._ranks, self._special = regex.compile(pat_str), mergeable_ranks, special_tokens
        self._split = re.compile("(" + "|".join(map(re.escape, special_tokens)) + ")")
        self._bytes = {rank: token for token, rank in mergeable_ranks.items()}
        self._bytes |= {number: token.encode() for token, number in special_tokens.items()}
        self.n_vocab = max(self._bytes) + 1

    def encode(self, text, *, allowed_special=frozenset(), disallowed_special="all"):
        assert disallowed_special == (), "it would raise for some texts"
        parts = self._split.split(text) if allowed_special == "all" else [text]
        found = []
        for part in parts:
            if part in self._special and allowed_special == "all":
                found.append(self._special[part])
            else:
                for piece in self._pattern.findall(part):
                    found += self._merge(piece.encode())
        return found

    def _merge(self, piece):
        parts = [bytes([byte]) for byte in piece]
        while len(parts) > 1:
            ranks = [self._ranks.get(a + b, 1 << 30) for a, b in zip(parts, parts[1:])]
            if min(ranks) == 1 << 30:
                break
            at = ranks.index(min(ranks))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self._ranks[part] for part in parts]

    def decode_single_token_bytes(self, number):
        return self._bytes[number]

    def decode(self, numbers):
        return b"".join(map(self._bytes.__getitem__, numbers)).decode("utf-8", "replace")
'''

PUBLISHED = {
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_method": "noaux_tc",
}
"""Fields of the published config.json that transformers writes otherwise or not; SGLang needs ``moe_layer_freq``."""

CONFIGURATION = """
from transformers import DeepseekV3Config as Published


class DeepseekV3Config(Published):
    model_type = "kimi_k2"
"""


def write_kimi_files(directory: Path) -> None:
    """Add the tokenizer's files and the code to a directory with config.json and weights."""
    tokens = [bytes([byte]) for byte in range(256)] + [pair.encode() for pair in PAIRS]
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    (directory / "tiktoken.model").write_bytes(b"".join(lines))
    (directory / "tokenization_kimi.py").write_text(TOKENIZER)
    (directory / "pairs.py").write_text(PAIRS_CODE)
    (directory / "configuration_deepseek.py").write_text(CONFIGURATION)
    (directory / "modeling_deepseek.py").write_text('raise AssertionError("code of the model is never run")\n')
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    config = {
        "added_tokens_decoder": {
            str(BASE + number): {"content": name, "special": name not in NOT_SPECIAL, **plain}
            for name, number in SPECIAL.items()
        },
        "additional_special_tokens": [name for name in SPECIAL if name.startswith("<|") and name not in NOT_SPECIAL],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "extra_special_tokens": {},
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    generation = {"eos_token_id": BASE + SPECIAL["<|im_end|>"], "max_length": 131072}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    path = directory / "config.json"
    settings = json.loads(path.read_text())
    code = {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    }
    settings |= {"auto_map": code, "bos_token_id": BASE, "eos_token_id": BASE + 1, **PUBLISHED}
    rope = settings.pop("rope_parameters")  # transformers 5 writes it for these two
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    settings |= {"rope_theta": theta, "rope_scaling": {**rope, "type": kind}}
    path.write_text(json.dumps(settings, indent=2))


async def odd_tokens(prompt: Prompt, sample: Sample) -> float:
    """A reward that differs among samples of random weights."""
    return float((sample.tokens[sample.prompt_length :] % 2).sum())
