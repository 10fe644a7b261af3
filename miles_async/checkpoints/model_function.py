"""Compares the model of a resumed run with the saved one: config, end tokens, tokenizer, chat template, and how images
become inputs.

Engine and trainer read the same directory: if somebody changes ``rope_theta`` in it, both are wrong alike, and no
comparison of them would notice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from miles_async.arguments.model_files import read_config, read_json
from miles_async.types import JsonObject

# Fields of config.json that do not change what the model computes here.
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
        "eos_token_id",  # compared together with config.json's
    }
)
# Fields of an image processor that only name it.
IMAGES_WITHOUT_EFFECT = frozenset({"auto_map", "image_processor_type", "processor_class", "transformers_version"})
# Parts of tokenizer.json that users of it set as they please.
_TOKENIZER_WITHOUT_EFFECT = ("version", "truncation", "padding")
# Fields of tokenizer_config.json and special_tokens_map.json that change tokens or texts.
_TOKENIZER_SETTINGS = ("add_bos_token", "add_eos_token")
_TOKENIZER_SWITCHES = ("split_special_tokens", "clean_up_tokenization_spaces")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token")
_MORE_SPECIAL_TOKENS = ("additional_special_tokens", "extra_special_tokens")  # transformers 4's name and 5's
_STEPS = ("pre_tokenizer", "pretokenizers", "post_processor", "processors", "decoder", "decoders")
_NO_CLASS = ("PreTrainedTokenizer", "TokenizersBackend")  # which take tokenizer.json as it is
# Entries of a fingerprint that are not fields of config.json.
_NO_FIELDS = (
    *("function", "tokenizer", "chat_template", "weights"),
    *("lora_rank", "lora_type", "lora_alpha", "target_modules"),
)
_VOCABULARIES = ("tokenizer.model", "spiece.model", "tiktoken.model", "tekken.json", "vocab.json", "merges.txt")


def model_function(directory: Path) -> JsonObject:
    """Return name → value of everything in ``directory`` but the weights that changes what is computed or sampled.

    Names are fields of config.json, fields of generation_config.json after "generation.", fields of
    preprocessor_config.json after "images.", tokenizer and chat_template. The latter two are digests; JSON files are
    compared by their content. What is absent or empty is left out; end tokens of both files are merged. A null of
    config.json stays: some models have another default.
    """
    config = _flat_rope(read_config(directory))
    generation = read_json(directory / "generation_config.json")
    found = _chosen(config, WITHOUT_EFFECT)
    found |= _chosen(generation, GENERATION_WITHOUT_EFFECT, "generation.")
    found |= _chosen(_images(directory), IMAGES_WITHOUT_EFFECT, "images.")
    found["eos_token_id"] = sorted({*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))})
    found |= {"tokenizer": _tokenizer(directory), "chat_template": _chat_template(directory)}
    nulls = {name: None for name, value in config.items() if value is None and name in found}
    return {**_present(found), **nulls}


def critic_function(directory: Path) -> JsonObject:
    """Fields of the critic's config.json that change its values, each after "critic."."""
    return _chosen(_present(_flat_rope(read_config(directory))), WITHOUT_EFFECT, "critic.")


def differing(saved: JsonObject, now: JsonObject, anyway: Collection[str] = ()) -> dict[str, str]:
    """Compare two fingerprints' ``function``. Returns name → saved and present value, for each name that differs.

    ``anyway``: names that may differ. A field that one config leaves to transformers' default is equal to that default:
    releases differ in which of them they write.
    """
    before, after = (fingerprint.get("function") or {} for fingerprint in (saved, now))
    names = [
        name
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name) or (name in before) != (name in after)
    ]
    if any(before.get(name) is None or after.get(name) is None for name in names):
        full_before, full_after = _with_defaults(saved, before), _with_defaults(now, after)
        names = [name for name in names if full_before.get(name) != full_after.get(name)]
    return {
        name: f"{name} was {_shown(before, name)} and is {_shown(after, name)}" for name in names if name not in anyway
    }


def _with_defaults(fingerprint: JsonObject, function: JsonObject) -> JsonObject:
    """``function`` with the fields that transformers' config class of this model adds to it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = {name: value for name, value in {**fingerprint, **function}.items() if name not in _NO_FIELDS}
    try:
        defaults = CONFIG_MAPPING[fields.pop("model_type")](**fields).to_dict()
    except Exception:  # a config class may raise anything; its defaults are not known then
        return function
    return {**_flat_rope(defaults), **_present(function)}


def _chosen(fields: JsonObject, without: Collection[str], prefix: str = "") -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in fields.items() if name not in without}


def _present(fields: JsonObject) -> JsonObject:
    return {name: value for name, value in fields.items() if value not in (None, "", [], {})}


def _ids(value: object) -> list[int]:
    """Engines stop at the end tokens of both files."""
    return value if isinstance(value, list) else [value] if isinstance(value, int) else []


def _flat_rope(config: JsonObject) -> JsonObject:
    """Transformers 5 writes ``rope_theta`` into ``rope_parameters``, earlier ones next to ``rope_scaling``."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    rest = {name: value for name, value in config.items() if name not in ("rope_parameters", "rope_scaling")}
    if not isinstance(rope, dict):
        return rest
    theta = rope.get("rope_theta", config.get("rope_theta"))
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "rope_type", "type")}
    return {
        **rest,
        **({} if theta is None else {"rope_theta": theta}),
        "rope_scaling": {**scaling, "rope_type": kind} if scaling or kind != "default" else {},
    }


def _images(directory: Path) -> JsonObject:
    """The image processor's fields; transformers 5 writes them into a file of all processors, and reads that first."""
    of_all = read_json(directory / "processor_config.json").get("image_processor")
    return of_all if isinstance(of_all, dict) else read_json(directory / "preprocessor_config.json")


def _tokenizer(directory: Path) -> str:
    whole = read_json(directory / "tokenizer.json")
    settings = read_json(directory / "tokenizer_config.json")
    parts: list[object] = [_tokenizer_settings(directory, settings, whole)]
    parts.append(_plain({name: value for name, value in whole.items() if name not in _TOKENIZER_WITHOUT_EFFECT}))
    digest = hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8)
    if not whole:  # else the same in another form
        for path in (directory / name for name in _VOCABULARIES):
            if path.is_file():
                digest.update(path.read_bytes())
        digest.update(json.dumps(settings.get("added_tokens_decoder"), sort_keys=True).encode())
    return digest.hexdigest()


def _tokenizer_settings(directory: Path, settings: JsonObject, whole: JsonObject) -> JsonObject:
    """Settings from the other files of a tokenizer, read as transformers 5 does: special_tokens_map.json wins."""
    fields = {**settings, **read_json(directory / "special_tokens_map.json")}
    found = {name: fields.get(name) for name in _TOKENIZER_SETTINGS}
    found |= {name: _text(fields.get(name)) for name in _SPECIAL_TOKENS}
    found |= {name: bool(fields.get(name)) for name in _TOKENIZER_SWITCHES}
    more = [fields.get(name) or [] for name in _MORE_SPECIAL_TOKENS]
    special = {_text(token) for tokens in more for token in (tokens.values() if isinstance(tokens, dict) else tokens)}
    found["special"] = sorted(map(str, special))
    known = {_text(token) for token in whole.get("added_tokens") or []} | {found[name] for name in _SPECIAL_TOKENS}
    added = {_text(token) for token in (settings.get("added_tokens_decoder") or {}).values()}
    added |= read_json(directory / "added_tokens.json").keys()
    found["added"] = sorted(map(str, added - known))
    kind = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    found["class"] = "" if kind in _NO_CLASS else kind
    return found


def _text(token: object) -> object:
    """A token's text, which some files hold among its properties."""
    return token.get("content") if isinstance(token, dict) else token


def _plain(tokenizer: JsonObject) -> JsonObject:
    """tokenizer.json in one form: releases of ``tokenizers`` differ in how they write merges and in unset fields, those
    of transformers in the offsets of tokens in a text, which nothing here asks for.
    """
    tokenizer = _without_offsets(tokenizer)
    model = tokenizer.get("model")
    if not isinstance(model, dict):
        return tokenizer
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or []]
    return {**tokenizer, "model": {name: value for name, value in model.items() if value} | {"merges": merges}}


def _without_offsets(steps: Any) -> Any:
    """Steps of a tokenizer without ``trim_offsets``, at any depth."""
    if isinstance(steps, list):
        return [_without_offsets(step) for step in steps]
    if not isinstance(steps, dict):
        return steps
    return {
        name: _without_offsets(value) if name in _STEPS else value
        for name, value in steps.items()
        if name != "trim_offsets"
    }


def _chat_template(directory: Path) -> str:
    more = directory / "additional_chat_templates"
    files = {"default": directory / "chat_template.jinja", **{path.stem: path for path in sorted(more.glob("*.jinja"))}}
    templates = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
    templates = templates or _templates(read_json(directory / "tokenizer_config.json").get("chat_template"))
    templates = {name: text.removesuffix("\n") for name, text in templates.items() if text}  # as Jinja does
    if not templates:
        return ""
    text = templates["default"] if templates.keys() == {"default"} else json.dumps(templates, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _templates(value: object) -> dict[str, str]:
    """Name → template of tokenizer_config.json's field."""
    if isinstance(value, list):
        return {template["name"]: template["template"] for template in value}
    return {"default": value} if isinstance(value, str) else {}


def _shown(function: JsonObject, name: str) -> str:
    text = json.dumps(function[name]) if name in function else "absent"
    return text if len(text) <= 80 else text[:80] + "…"
