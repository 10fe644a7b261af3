"""An export copies its source's other files, tried with the files that families publish."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from miles_async.backends.megatron.checkpoints import hf_export
from miles_async.errors import ConfigurationError
from miles_async.prompts.tokenizers import load_tokenizer
from tests.fakes.chat_formats import chat_format

KEPT = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt "
    "tokenizer.model tokenizer.model.v3 tiktoken.model spiece.model tekken.json params.json SYSTEM_PROMPT.txt "
    "chat_template.jinja chat_template.json additional_chat_templates/tool_use.jinja "
    "preprocessor_config.json video_preprocessor_config.json processor_config.json generation_config.json "
    "LICENSE LICENSE-MODEL USE_POLICY.md USAGE_POLICY THIRD_PARTY_NOTICES.md docs/tool_call_guidance.md "
    "tokenization_kimi.py tool_declaration_ts.py configuration_deepseek.py modeling_deepseek.py "
    "nemotron_toolcall_parser_no_streaming.py encoding/encoding_dsv32.py inference/model.py "
    "inference/configs/config_671B.json figures/benchmark.png"
)
"""Files next to the weights of published models, by family of ``known.py``."""

LEFT = (
    "model-00001-of-00002.safetensors model.safetensors.index.json pytorch_model.bin pytorch_model.bin.index.json "
    "consolidated.safetensors original/consolidated.00.pth original/params.json original/tokenizer.model "
    "metal/model.bin onnx/model.onnx onnx/config.json adapter/adapter_model.safetensors adapter/adapter_config.json "
    ".gitattributes .cache/huggingface/download.metadata config.json README.md"
)


def write(folder: Path, names: str) -> None:
    for name in names.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_all_but_weights_is_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "model", tmp_path / "model" / "exports" / "12"
    write(source, f"{KEPT} {LEFT} exports/6/model.safetensors")
    target.mkdir(parents=True)
    hf_export.copy_companions(source, target)
    assert files(target) == {*KEPT.split()}
    assert all((target / name).read_text() == name for name in KEPT.split())


def test_what_is_too_large_for_a_vocabulary_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_export, "MOST_BYTES", 100)
    write(tmp_path / "model", "tokenizer.json")
    (tmp_path / "model" / "weights.unknown").write_bytes(bytes(101))
    (tmp_path / "copy").mkdir()
    hf_export.copy_companions(tmp_path / "model", tmp_path / "copy")
    assert files(tmp_path / "copy") == {"tokenizer.json"}


def own_tokenizer(folder: Path) -> Path:
    """A model directory laid out like Kimi-K2's: a vocabulary and a tokenizer in a file of its own."""
    (folder / "model").mkdir()
    (folder / "model" / "tokenization_own.py").write_text(OWN_TOKENIZER)
    (folder / "model" / "words.py").write_text("def words(text):\n    return text.split()\n")
    (folder / "model" / "own.model").write_text("<end> one two three")
    (folder / "model" / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "OwnTokenizer",
                "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]},
                "eos_token": "<end>",
            }
        )
    )
    config = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    (folder / "model" / "configuration_own.py").write_text(
        "from transformers import DeepseekV3Config\n\n\n"
        "class OwnConfig(DeepseekV3Config):\n    model_type = 'kimi_k2'\n"
    )
    return folder / "model"


OWN_TOKENIZER = """
import os
from transformers import PreTrainedTokenizer
from .words import words

class OwnTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "own.model"}

    def __init__(self, vocab_file, **options):
        self.all = open(vocab_file).read().split()
        super().__init__(**options)

    @property
    def vocab_size(self):
        return len(self.all)

    def get_vocab(self):
        return {word: number for number, word in enumerate(self.all)}

    def _tokenize(self, text):
        return words(text)

    def _convert_token_to_id(self, token):
        return self.all.index(token)

    def _convert_id_to_token(self, index):
        return self.all[index]
"""


def test_code_of_a_tokenizer_runs_with_the_flag_alone_and_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail("a question on the terminal"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = own_tokenizer(tmp_path)
    with pytest.raises(ConfigurationError, match=r"tokenization_own\.py .sha256 .*--trust-remote-code"):
        load_tokenizer(model)
    (tmp_path / "copy").mkdir()
    hf_export.copy_companions(model, tmp_path / "copy")
    (tmp_path / "copy" / "config.json").write_text((model / "config.json").read_text())
    for path in (model, tmp_path / "copy"):
        assert load_tokenizer(path, trust_remote_code=True).encode("two three one") == [2, 3, 1]


def test_code_is_asked_for_where_transformers_cannot_read_config_json_without_it(tmp_path: Path) -> None:
    """As of Kimi-K2: a model_type that it does not know, with YaRN as published."""
    model = own_tokenizer(tmp_path)
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_scaling": {"type": "yarn", "factor": 32.0}}))
    with pytest.raises(ConfigurationError, match="--trust-remote-code"):
        load_tokenizer(model)


def test_code_of_another_repository_is_refused(tmp_path: Path) -> None:
    model = own_tokenizer(tmp_path)
    path = model / "tokenizer_config.json"
    path.write_text(path.read_text().replace("tokenization_own.Own", "org/repo--tokenization_own.Own"))
    with pytest.raises(ConfigurationError, match="code of another repository"):
        load_tokenizer(model, trust_remote_code=True)
    path.write_text(path.read_text().replace("org/repo--tokenization_own.Own", "tokenization_gone.Own"))
    with pytest.raises(ConfigurationError, match="there is no such file"):
        load_tokenizer(model, trust_remote_code=True)


@pytest.mark.parametrize("part", ["AutoConfig", "AutoTokenizer"])
def test_code_of_another_repository_is_refused_in_config_json_as_well(part: str, tmp_path: Path) -> None:
    model = own_tokenizer(tmp_path)
    (model / "config.json").write_text(json.dumps({"auto_map": {part: "org/repo--tokenization_own.OwnTokenizer"}}))
    with pytest.raises(ConfigurationError, match=r"config\.json names org/repo--.*, code of another repository"):
        load_tokenizer(model, trust_remote_code=True)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import sys\nsys.exit(3)", r"sys\.exit\(3\)"),
        ("1 / 0", "by zero"),
        ("class E(BaseException): pass\nraise E('e')", "e"),
    ],
)
def test_whatever_code_of_a_tokenizer_raises_is_told_with_the_flag(
    code: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "modules").mkdir()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)  # of another test's cache
    model = own_tokenizer(tmp_path)
    (model / "words.py").write_text(code)
    with pytest.raises(ConfigurationError, match=rf"--hf-checkpoint .*: no usable tokenizer there: .*{found}"):
        load_tokenizer(model, trust_remote_code=True)


def test_an_auto_map_of_another_form_is_told_with_the_flag(tmp_path: Path) -> None:
    model = own_tokenizer(tmp_path)
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": ["tokenization_own.OwnTokenizer"]}))
    with pytest.raises(ConfigurationError, match="--hf-checkpoint"):
        load_tokenizer(model)


def test_a_tokenizer_is_loaded_from_what_was_copied(tmp_path: Path) -> None:
    chat = chat_format("qwen3")
    chat.tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "copy").mkdir()
    hf_export.copy_companions(tmp_path / "model", tmp_path / "copy")
    (tmp_path / "copy" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    copied = load_tokenizer(tmp_path / "copy")
    assert copied.chat_template == chat.tokenizer.chat_template
    assert copied.encode("17 times 4") == chat.tokenizer.encode("17 times 4")
