"""Load a model directory's tokenizer. Its own code (``auto_map``) runs only with ``--trust-remote-code``."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from miles_async.arguments.model_files import read_json
from miles_async.errors import ConfigurationError

if TYPE_CHECKING:  # imported when a tokenizer is loaded
    from transformers import PreTrainedTokenizerBase

# Classes that added <bos> in transformers 4 unless tokenizer_config.json said otherwise.
_ADDING_BOS = frozenset(
    f"{name}Tokenizer{fast}" for name in ("Llama", "CodeLlama", "Gemma", "Cohere") for fast in ("", "Fast")
)


@lru_cache(maxsize=8)
def load_tokenizer(path: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the Hugging Face tokenizer in ``path``, once per process, from local files only (M22).

    ``trust_remote_code``: run its own code. Raises ConfigurationError naming the directory.
    """
    from transformers import AutoTokenizer

    if not path.is_dir():
        raise ConfigurationError(f"--hf-checkpoint {path}: there is no such directory")
    has_code = _check_code(path, trusted=trust_remote_code)
    try:
        # None, the default, would ask on the terminal.
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=trust_remote_code)
    except KeyboardInterrupt:
        raise
    # supervision point: transformers raises anything for files that it does not expect, and so does a tokenizer's code
    except BaseException as error:
        if not trust_remote_code and (has_code or "trust_remote_code" in str(error)):
            raise ConfigurationError(_refusal(path)) from error
        text = f"its code called sys.exit({error.code!r})" if isinstance(error, SystemExit) else error
        raise ConfigurationError(f"--hf-checkpoint {path}: no usable tokenizer there: {text}") from error
    if tokenizer.vocab_size <= 1:  # by config.json transformers makes one without a vocabulary
        raise ConfigurationError(f"--hf-checkpoint {path}: no usable tokenizer there: expected tokenizer.json")
    _restore_components(tokenizer, path)
    return tokenizer


def _restore_components(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Use the components that tokenizer.json names, and ``add_bos_token``, as transformers 4 and SGLang do; and no
    truncation or padding: some files have what their last user asked for, which would cut prompts without a word.

    In transformers 5 LlamaTokenizer and Qwen2Tokenizer replace the file's components by their own. A model whose
    tokenizer_config.json names the wrong class, such as DeepSeek-R1-Distill-Llama, would get other token ids than those
    that it was trained with.
    """
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not (path / "tokenizer.json").is_file():
        return
    written = Tokenizer.from_file(str(path / "tokenizer.json"))
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        setattr(backend, part, getattr(written, part))
    backend.no_truncation()
    backend.no_padding()
    settings = read_json(path / "tokenizer_config.json")
    if settings.get("tokenizer_class") in _ADDING_BOS:
        tokenizer.add_bos_token = settings.get("add_bos_token") is not False  # replaces the file's post-processor, too


def _check_code(path: Path, *, trusted: bool) -> bool:
    """Return whether a tokenizer names its own code. Raises ConfigurationError if it is trusted and missing.

    Without trust a class of transformers takes its place if there is one.
    """
    references = _references(path, "tokenizer_config.json", "AutoTokenizer")
    named = [("tokenizer_config.json", reference) for reference in references]
    # With trust, transformers and engines look there as well.
    for part in ("AutoTokenizer", "AutoConfig"):
        named += [("config.json", reference) for reference in _references(path, "config.json", part)]
    for file, reference in named:
        if trusted and "--" in reference:
            raise ConfigurationError(
                f"--hf-checkpoint {path}: {file} names {reference}, code of another repository, and nothing is "
                "downloaded: copy its files into the directory, and leave the name in front of -- out"
            )
        if trusted and not (path / f"{reference.rpartition('.')[0]}.py").is_file():
            raise ConfigurationError(f"--hf-checkpoint {path}: {file} names {reference}, and there is no such file")
    return bool(references)


def _references(path: Path, file: str, part: str) -> list[str]:
    named = read_json(path / file).get("auto_map")
    classes = named.get(part) if isinstance(named, dict) else named if part == "AutoTokenizer" else None
    return [str(reference) for reference in (classes if isinstance(classes, list) else [classes]) if reference]


def digests(path: Path) -> dict[str, str]:
    """Python files of a model directory, which its tokenizer may import: name → first 16 digits of SHA-256."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in sorted(path.glob("*.py"))}


def _refusal(path: Path) -> str:
    """Why a tokenizer that needs its own code is not loaded, and which flag does."""
    files = ", ".join(f"{name} (sha256 {digest})" for name, digest in digests(path).items()) or "none there"
    return (
        f"--hf-checkpoint {path}: its tokenizer needs its own code, which is not run by default. Read its Python files "
        f"({files}), then add --trust-remote-code"
    )
