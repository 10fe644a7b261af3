"""The pages tell the truth about the tree: files, links, flags, commands and examples that they name exist.

# covers: R13
"""

from __future__ import annotations

import re
import shlex
import sys
import types
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from miles_async.api import GroupFilter, Reward
from miles_async.arguments.adapters import check_adapters
from miles_async.arguments.foreign import FOREIGN_FLAGS
from miles_async.arguments.megatron_fields import as_megatron_flags
from miles_async.arguments.parser import build_parser, parse_arguments
from miles_async.arguments.pass_through import PREFIXES, is_pass_through
from miles_async.cli import main
from miles_async.runtime.hooks import load_object
from miles_async.types import Attempt, Group, Prompt, Sample
from scripts.docs_site import text_of

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("README.md"),
    ]
)

SUFFIXES = (
    ".args",
    ".in",
    ".jsonl",
    ".json",
    ".lock",
    ".log",
    ".md",
    ".parquet",
    ".png",
    ".py",
    ".toml",
    ".tsv",
    ".txt",
    ".yaml",
    ".yml",
)
MADE_LATER = {
    "environment-prompts/",  # by --environment
    *("summary.json", "metrics.jsonl", "reward.png", "config.toml", "dead_letters.jsonl", "restarts.json"),  # by a run
    *("ledger.sqlite", "readmit.json", "schedule.msgpack", "run.json", "stall.txt", "samples/", "profiles/"),
    *("samples/train-00000010.parquet", "samples/eval-00000010.parquet", "samples/state.json"),
    *(
        "console.log",
        "carried/",
        "evaluation.json",
        "engines.json",
        "ranks.json",
        "samples/eval-00000000.parquet",
        "report.html",
        "runs/quickstart/report.html",
    ),
    ".venv/docs",  # by make docs
    *(
        "logs/",
        "wandb/",
        "wandb_run_id",
        "mlflow_run_id",
        "trackio_run_id",
        "swanlab_run_id",
        "swanlog/",
        "tensorboard/",
        "hf/",
        "runs/",
        "runs/latest",
        "runs/quickstart",
        "runs/quickstart/",
        "runs/bench/NAME.json",
    ),
    *("logs/driver.log", "logs/rollout.log", "logs/engine-0.0.log", "logs/engine-0.1.log"),
    *(
        "logs/rollout-output.log",
        "logs/mcp-servers.log",
        "logs/verifiers.log",
        "logs/router.0.log",
        "logs/engine_imports.log",
        "logs/rank_imports.log",
        "logs/actor_imports.log",
        "logs/trainer-0.log",
        "logs/sessions-0.0.log",
        "logs/agents.log",
    ),
    *("docs/staleness_study.md", "docs/staleness_study.png", "docs/staleness_study.json"),  # by `make study`
    "examples/smollm2/data",  # by its prepare.py
    "my_hooks.py",  # by the reader
}
"""Files that pages may name though the repository does not hold them."""

RAY_START_FLAGS = {"--head", "--port", "--address", "--node-ip-address", "--labels"}
DOCKER_FLAGS = {
    *("--rm", "--entrypoint", "--gpus", "--shm-size", "--ulimit", "--network", "--volume", "--stop-timeout"),
    "--file",
    "--isolation",  # of buildah
}
UVICORN_FLAGS = {"--app-dir"}
PIP_FLAGS = {"--no-deps", "--no-index", "--target"}
HYDRA_FLAGS = {"--config-path", "--config-name"}
HARBOR_FLAGS = {"--trials-dir"}
OTHER_TOOLS_FLAGS = frozenset(
    {"--help", "--version", "--X", "--logdir", "--project"}
    | {*HYDRA_FLAGS, *HARBOR_FLAGS, *DOCKER_FLAGS, *UVICORN_FLAGS, *PIP_FLAGS, *RAY_START_FLAGS}
)  # --X: a placeholder


def on_pages(pages: list[Path] = PAGES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=[str(page.relative_to(ROOT)) for page in pages])


# ------------------------------------------------------------------------------------------------- reading a page
def code_spans(text: str) -> list[str]:
    """Text in single backticks, outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def code_blocks(text: str) -> list[str]:
    """Lines of fenced and of indented blocks."""
    fenced = [line for block in re.findall(r"```.*?\n(.*?)```", text, flags=re.DOTALL) for line in block.splitlines()]
    return fenced + [line for line in text.splitlines() if line.startswith("    ")]


def anchor(heading: str) -> str:
    """As GitHub makes it: lower case, punctuation away, spaces to hyphens."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", "")).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = text_of(page)
    headings = {anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)}
    return headings | set(re.findall(r'<a id="([\w-]+)"></a>', text))


def named_paths(text: str) -> Iterator[str]:
    """Code spans that are paths: by their suffix, a slash at the end, or a folder of ours in front."""
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()} | {"runs"}
    for span in code_spans(text):
        is_words = re.search(r"[\s<>{}()*=@:…]|\.\.\.|--", span)
        if not is_words and (span.endswith((*SUFFIXES, "/")) or ("/" in span and span.split("/")[0] in folders)):
            yield span
    yield from re.findall(r"@((?:arguments|examples)/\S+\.args)", text)


def exists(name: str, page: Path) -> bool:
    if name in MADE_LATER or str(page.parent.relative_to(ROOT) / name) in MADE_LATER:
        return True
    # Pages may leave the name of the package or of their own folder out: `staleness/pool.py`.
    return any((base / name).exists() for base in (ROOT, ROOT / "miles_async", ROOT / ".github/workflows", page.parent))


# ------------------------------------------------------------------------------------------------------ the tests
@on_pages()
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if target.startswith(("https://", "http://")):
            continue
        name, _, fragment = target.partition("#")
        assert not name or exists(name, page), f"{page.name} links to {target}"
        linked = page.parent / name if name else page
        if fragment and linked.exists():
            assert fragment in anchors(linked), f"{page.name} links to {target}; there are {sorted(anchors(linked))}"


@on_pages()
def test_files_exist(page: Path) -> None:
    missing = [name for name in named_paths(text_of(page)) if not exists(name, page)]
    assert not missing


@lru_cache(maxsize=1)
def flags_of_ours() -> frozenset[str]:
    """Flags of `miles-async train`, negated ones too."""
    return frozenset(build_parser("miles-async train")._option_string_actions)


@lru_cache(maxsize=1)
def flags_of_scripts() -> frozenset[str]:
    """Flags of commands in examples/, scripts/ and tests/benchmarks/, and of miles-async's other than ``train``."""
    sources = [
        path.read_text()
        for folder in ("examples", "scripts", "tests/benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    ]
    sources += [path.read_text() for path in (ROOT / "miles_async/commands").rglob("*.py")]
    return frozenset(flag for source in sources for flag in re.findall(r"add_argument\(\s*\"(--[\w-]+)\"", source))


def is_known(flag: str, page: Path) -> bool:
    ours = flags_of_ours()
    if "*" in flag:  # --sglang-*, --custom-*-path
        return flag.removesuffix("*") in PREFIXES or any(fnmatchcase(name, flag) for name in ours)
    if page.name in ("CHANGELOG.md", "migrate.md") and flag in FOREIGN_FLAGS:
        return True
    if flag in ours | flags_of_scripts() | OTHER_TOOLS_FLAGS or is_pass_through(flag, ours):
        return True
    return next(as_megatron_flags([flag], list(ours))) != flag


@on_pages()
def test_flags_exist(page: Path) -> None:
    named = re.findall(r"(?<![\w-])--[a-zA-Z][\w*-]*", text_of(page))
    assert not [flag for flag in dict.fromkeys(named) if not is_known(flag, page)]


@on_pages()
def test_make_targets_exist(page: Path) -> None:
    text, makefile = text_of(page), (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    code = "\n".join(code_spans(text) + code_blocks(text))
    named = set(re.findall(r"\bmake ([a-z-]+)", code))
    assert named <= targets


async def test_hooks_of_the_readme_work(monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    module = types.ModuleType("my_hooks")
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, "my_hooks", module)
    reward = load_object("my_hooks:digits_right", Reward, "--custom-rm-path")
    keeps = load_object("my_hooks:has_spread", GroupFilter, "--group-filter-path")

    prompt = Prompt(prompt_id="train.jsonl:1", token_ids=(1, 2), text="rev 1234", label="4321")
    assert await reward(prompt, sample("4329", "stop")) == 0.75
    assert await reward(prompt, sample("4321", "length")) == 0.0
    assert keeps(group(prompt, 0.0, 1.0)) is None
    assert keeps(group(prompt, 1.0, 1.0)) == "all rewards are equal"


def test_command_of_the_readme_finds_the_hooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As typed, but for the prompts, which a fresh clone doesn't have yet, and ``--dry-run``."""
    readme = (ROOT / "README.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    (command,) = [c for c in re.findall(r"(?:^    .*\n)+", readme, flags=re.MULTILINE) if "my_hooks:digits_right" in c]
    (tmp_path / "my_hooks.py").write_text(source)
    (tmp_path / "train.jsonl").write_text('{"prompt": "rev 12", "label": "21"}\n')
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    program, *words = shlex.split(command.replace("\\\n", " "))
    assert program == ".venv/bin/miles-async"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the working directory
    monkeypatch.delitem(sys.modules, "my_hooks", raising=False)
    try:
        code = main([*words, "--prompt-data", "train.jsonl", "--eval-prompt-data", "train.jsonl", "--dry-run"])
    finally:
        sys.modules.pop("my_hooks", None)
    output = capsys.readouterr()
    assert code == 0, output.err
    assert "my_hooks:digits_right" in output.out


def test_command_of_the_page_about_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command, *_ = re.findall(r"(?:^    .*\n)+", (ROOT / "docs/adapters.md").read_text(), flags=re.MULTILINE)
    program, verb, *words = shlex.split(command.replace("\\\n", " "))
    assert (Path(program).name, verb) == ("miles-async", "train")
    arguments = parse_arguments(words, prog=verb).arguments
    assert (arguments.model.lora_rank, arguments.model.lora_alpha, arguments.optimizer.lr) == (8, 32, 3e-3)
    assert list(check_adapters(arguments)) == []


def sample(text: str, finish_reason: str, reward: float | None = None) -> Sample:
    return Sample(
        tokens=np.array([1, 2, 3], np.int32),
        prompt_length=2,
        loss_mask=np.array([0, 0, 1], np.uint8),
        rollout_logprobs=np.zeros(3, np.float32),
        weight_versions=np.array([-1, -1, 0], np.int32),
        text=text,
        finish_reason=finish_reason,
        reward=reward,
    )


def group(prompt: Prompt, *rewards: float) -> Group:
    attempt = Attempt(attempt_id=0, prompt=prompt, epoch=0)
    samples = tuple(sample("", "stop", reward) for reward in rewards)
    return Group(attempt=attempt, samples=samples, oldest_version=0, newest_version=0)
