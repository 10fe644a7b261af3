"""Comments and docstrings tell the truth about the tree: files and modules that they cite exist.

# covers: R13
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("arguments", "miles_async", "tests", "scripts", "examples")
TREE = (*SOURCES, "docs", "deploy", "docker", "requirements", ".ci", ".github")

FILE = re.compile(r"(?<![\w/.<>{}*~:-])((?:[\w.-]+/)*[\w-]+\.(?:args|ini|lock|md|py|sh|toml|yaml|yml))(?![\w/])")
NAME = re.compile(r"``(\w+(?:\.\w+)+)(?:\(\))?``|:(?:attr|class|func|meth|mod):`~?(\w+(?:\.\w+)+)`")

SUFFIXES = {"args", "ini", "json", "jsonl", "lock", "md", "msgpack", "png", "py", "sh", "toml", "txt", "yaml", "yml"}

FILES_OF_OTHERS = {
    *("distrib_optimizer.py", "clip_grads.py", "core/tensor_parallel/layers.py"),  # Megatron
    *("pytorch/attention/dot_product_attention/utils.py", "pytorch/attention/.../backends.py"),  # Transformer Engine
    *("entrypoints/engine.py", "managers/scheduler.py", "srt/utils/weight_versions.py"),  # SGLang
    *("setup_worker.py", "ray/_private/accelerators/nvidia_gpu.py"),  # Ray
    *(
        "trainer/config/ppo_megatron_trainer.yaml",
        "trainer/config/sft_trainer.yaml",
        "trainer/constants_ppo.py",
    ),  # verl
    "verl/trainer/ppo/rollout_corr_helper.py",
    *("ray/actor_group.py", "areal/trainer/ppo/actor.py"),  # slime, AReaL
    *("entrypoint.py", "convert_hf_to_gguf.py"),  # NVIDIA's images, llama.cpp
    "scripts/run_qwen3_4b.py",  # miles
}
MADE_LATER = {"file.toml", "fleet.toml", "my_losses.py", "report.md", "script.py"}  # by users, and by scripts


def sources() -> list[Path]:
    return sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py") if path.is_file())


@cache
def files() -> frozenset[str]:
    """Paths of the tree, whole and without their first folders: ``wiring/replay.py`` and ``replay.py`` are two."""
    paths = [path for folder in TREE for path in (ROOT / folder).rglob("*")] + list(ROOT.iterdir())
    parts = [path.relative_to(ROOT).parts for path in paths]
    return frozenset("/".join(each[i:]) for each in parts for i in range(len(each)))


@cache
def modules() -> dict[str, list[str]]:
    """Dotted name of a module, whole and without its first packages → contents of the modules that it fits."""
    found: dict[str, list[str]] = {}
    for path in sources():
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = (*(("miles_async",) if parts[0] == "arguments" else ()), *parts)
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        for i in range(len(parts)):
            found.setdefault(".".join(parts[i:]), []).append(path.read_text())
    return found


def prose(text: str) -> Iterator[str]:
    """Comments, and strings that are statements: docstrings of modules, classes, functions and constants."""
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
        elif token.type != tokenize.NL:
            if token.type == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
                yield token.string
            before = token.type


def absent_files(words: str) -> list[str]:
    cited = {path.removeprefix("./") for path in FILE.findall(words)}
    return sorted(cited - files() - FILES_OF_OTHERS - MADE_LATER)


def absent_names(words: str, text: str) -> list[str]:
    """Names that begin with a module of ours and lead nowhere. ``text``: of the file with these words."""
    names = {name or role for name, role in NAME.findall(words)}
    return sorted(name for name in names if is_absent(name.split("."), text))


def is_absent(parts: list[str], text: str) -> bool:
    if parts[-1] in SUFFIXES or re.search(rf"\b{parts[0]}: ", text):  # a file, or an attribute of an object
        return False
    known = False
    for length in range(1, len(parts) + 1):
        for content in modules().get(".".join(parts[:length]), ()):
            known = True
            if length == len(parts) or re.search(rf"\b{parts[length]}\b", content):
                return False
    return known


@pytest.mark.parametrize("folder", SOURCES)
def test_files_and_modules_that_code_cites_exist(folder: str) -> None:
    absent = {}
    for path in sources():
        if path.relative_to(ROOT).parts[0] == folder:
            text = path.read_text()
            words = "\n".join(prose(text))
            if found := [*absent_files(words), *absent_names(words, text)]:
                absent[str(path.relative_to(ROOT))] = found
    assert absent == {}


def test_what_is_gone_is_found() -> None:
    assert absent_files("See ``wiring/replay.py``, docs/gone.md and x/gone.py.") == ["docs/gone.md", "x/gone.py"]
    names = "``staleness.gone.parse``, ``staleness.versions.parse_spans``, :func:`wiring.replay.gone`"
    assert absent_names(names, "") == ["staleness.gone.parse", "wiring.replay.gone"]
    assert absent_names("``staleness.bound_of``", "def cut(staleness: Staleness): ...") == []


def test_messages_name_no_contract_by_its_id() -> None:
    """Ids such as C2 are for maintainers: comments, docstrings and tests have them, what users read has not."""
    found = [str(path) for path in sources() if re.search(r"[\"']C\d+: |\(C\d+\)[.;,]?\",?$", path.read_text(), re.M)]
    assert [path for path in found if "/tests/" not in path] == []
