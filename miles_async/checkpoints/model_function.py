"""Compares the model of a resumed run with the one that was saved: config, end tokens, tokenizer, chat template.

Engine and trainer read the same directory: if somebody changes ``rope_theta`` in it, both are wrong alike, and no
comparison of them would notice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path

from miles_async.arguments.model_files import read_config, read_json
from miles_async.types import JsonObject

# Fields of config.json that change nothing of what the model computes here.
WITHOUT_EFFECT = frozenset(
    {
        # what it is called, and who wrote the file
        *("_name_or_path", "auto_map", "transformers_version", "tokenizer_class", "model_type"),
        # how a library runs it: we choose that by flags
        *("torch_dtype", "dtype", "use_cache", "_attn_implementation", "attn_implementation", "pretraining_tp"),
        *("output_attentions", "output_hidden_states", "return_dict", "gradient_checkpointing", "torchscript"),
        *("use_return_dict", "chunk_size_feed_forward", "is_decoder", "is_encoder_decoder", "add_cross_attention"),
        # beginnings of weights, and heads of other tasks
        *("initializer_range", "id2label", "label2id", "num_labels", "problem_type", "task_specific_params"),
        # tokens that nothing of ours adds or stops at
        *("pad_token_id", "bos_token_id", "sep_token_id", "decoder_start_token_id"),
    }
)
# Fields of generation_config.json that requests say themselves, or that generation here has no use for.
GENERATION_WITHOUT_EFFECT = frozenset(
    {
        *("_from_model_config", "transformers_version", "do_sample", "temperature", "top_p", "top_k", "use_cache"),
        *("max_length", "max_new_tokens", "pad_token_id", "bos_token_id", "trust_remote_code"),
        "eos_token_id",  # compared together with that of config.json
    }
)
# Parts of tokenizer.json that users of it set as they please, and fields of tokenizer_config.json that add tokens.
_TOKENIZER_WITHOUT_EFFECT = ("version", "truncation", "padding")
_TOKENIZER_SETTINGS = ("add_bos_token", "add_eos_token", "bos_token", "eos_token")
_VOCABULARIES = ("tokenizer.model", "spiece.model", "tiktoken.model", "tekken.json", "vocab.json", "merges.txt")


def model_function(directory: Path) -> JsonObject:
    """Return name → value of everything in ``directory`` but the weights that changes what is computed or sampled.

    Names are those of fields of config.json, those of generation_config.json after "generation.", tokenizer and
    chat_template. The latter two are digests; JSON files are compared by their content. What is absent, null or empty
    is left out; end tokens are those of both files.
    """
    config = _flat_rope(read_config(directory))
    generation = read_json(directory / "generation_config.json")
    found = {name: value for name, value in config.items() if name not in WITHOUT_EFFECT}
    found |= {
        f"generation.{name}": value for name, value in generation.items() if name not in GENERATION_WITHOUT_EFFECT
    }
    found["eos_token_id"] = sorted({*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))})
    found |= {"tokenizer": _tokenizer(directory), "chat_template": _chat_template(directory)}
    return {name: value for name, value in found.items() if value not in (None, "", [], {})}


def differing(saved: Mapping[str, object], now: Mapping[str, object], anyway: Collection[str] = ()) -> dict[str, str]:
    """Name → what was saved and what there is now, of what differs; ``anyway``: names that may."""
    return {
        name: f"{name} was {_shown(saved.get(name))} and is {_shown(now.get(name))}"
        for name in sorted(saved.keys() | now.keys())
        if name not in anyway and saved.get(name) != now.get(name)
    }


def _ids(value: object) -> list[int]:
    """Engines stop at the end tokens of both files."""
    return value if isinstance(value, list) else [value] if isinstance(value, int) else []


def _flat_rope(config: JsonObject) -> JsonObject:
    """Transformers 5 writes ``rope_theta`` into ``rope_parameters``, earlier ones beside ``rope_scaling``."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, dict):
        return config
    rest = {name: value for name, value in config.items() if name not in ("rope_parameters", "rope_scaling")}
    theta = rope.get("rope_theta", config.get("rope_theta"))
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "rope_type", "type")}
    return {**rest, "rope_theta": theta, "rope_scaling": scaling and {**scaling, "rope_type": kind}}


def _tokenizer(directory: Path) -> str:
    whole = read_json(directory / "tokenizer.json")
    settings = read_json(directory / "tokenizer_config.json")
    parts: list[object] = [{name: settings.get(name) for name in _TOKENIZER_SETTINGS}]
    parts.append({name: value for name, value in whole.items() if name not in _TOKENIZER_WITHOUT_EFFECT})
    digest = hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8)
    if not whole:  # else the same in another form
        for path in (directory / name for name in _VOCABULARIES):
            if path.is_file():
                digest.update(path.read_bytes())
        digest.update(json.dumps(settings.get("added_tokens_decoder"), sort_keys=True).encode())
    return digest.hexdigest()


def _chat_template(directory: Path) -> str:
    own = directory / "chat_template.jinja"
    template = own.read_text(encoding="utf-8") if own.is_file() else None
    template = template or read_json(directory / "tokenizer_config.json").get("chat_template")
    if not template:
        return ""
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.blake2b(text.strip().encode(), digest_size=8).hexdigest()


def _shown(value: object) -> str:
    text = "absent" if value is None else json.dumps(value)
    return text if len(text) <= 80 else text[:80] + "…"
