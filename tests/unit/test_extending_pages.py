"""Examples of docs/extending work: files as shown, their tests pass; hooks there and in environments.md are loaded."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from miles_async.algorithms.registry import advantage_estimator, policy_loss, token_advantages
from miles_async.api import (
    Agent,
    Environment,
    Generate,
    GroupFilter,
    GroupReward,
    MakeEnvironment,
    PromptSampler,
    Reward,
    Tracker,
)
from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.arguments.sessions import parse_environment
from miles_async.engines.kind import ServerCommand
from miles_async.runtime.hooks import load_factory, load_instance, load_object
from miles_async.seams import InferenceServer
from miles_async.weights.transports.spec import TransportSpec

PAGES = Path(__file__).parents[2] / "docs" / "extending"
WITH_EXAMPLES = sorted(PAGES.glob("*.md"))
FILE = re.compile(r"```python\n# (?P<name>\w+)\.py\n(?P<source>.*?)```", re.DOTALL)
FLAG = re.compile(r"^    (?:.*\s)?(?P<flag>--[\w-]+) (?P<hook>[\w-]+:\w\S*)", re.MULTILINE)

CHOOSE: dict[str, Callable[[AlgorithmArguments], object]] = {
    "--policy-loss": policy_loss,
    "--advantage-estimator": advantage_estimator,
    "--token-advantages": token_advantages,
}


def choose(hook: str, flag: str) -> object:
    """Load an algorithm's flag as the registry does."""
    return CHOOSE[flag](AlgorithmArguments(**{flag.removeprefix("--").replace("-", "_"): hook}))


LOADS: dict[str, Callable[[str, str], object]] = {
    "--environment": lambda hook, flag: parse_environment(hook),
    "--custom-rm-path": lambda hook, flag: load_object(hook, Reward, flag),
    "--group-rm-path": lambda hook, flag: load_object(hook, GroupReward, flag),
    "--group-filter-path": lambda hook, flag: load_object(hook, GroupFilter, flag),
    "--environment-path": lambda hook, flag: load_factory(hook, MakeEnvironment, Environment, flag),
    "--custom-generate-function-path": lambda hook, flag: load_object(hook, Generate, flag),
    "--weight-transport": lambda hook, flag: load_instance(hook, TransportSpec, flag),
    "--prompt-sampler": lambda hook, flag: load_object(hook, PromptSampler, flag),
    "--agent-path": lambda hook, flag: load_object(hook, Agent, flag),
    "--custom-tracker-path": lambda hook, flag: load_object(hook, Tracker, flag),
    **dict.fromkeys(CHOOSE, choose),
}


def files(page: Path) -> dict[str, str]:
    """Module → source, of the blocks of a page that begin with a file name."""
    return {block["name"]: block["source"] for block in FILE.finditer(page.read_text(encoding="utf-8"))}


def examples() -> list[tuple[Path, str, str]]:
    """Return every test of every page: (page, module, function)."""
    return [
        (page, module, name)
        for page in WITH_EXAMPLES
        for module, source in files(page).items()
        if module.startswith("test_")
        for name in re.findall(r"^(?:async )?def (test_\w+)", source, re.MULTILINE)
    ]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Write the files of a page where they can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(page: Path) -> None:
        for module, source in files(page).items():
            (tmp_path / f"{module}.py").write_text(source, encoding="utf-8")

    yield write
    for module in set(sys.modules) - before:
        if Path(getattr(sys.modules[module], "__file__", None) or "").is_relative_to(tmp_path):
            del sys.modules[module]


@pytest.mark.parametrize(("page", "module", "name"), examples(), ids=lambda value: getattr(value, "stem", value))
async def test_the_test_of_an_example_passes(
    written: Callable[[Path], None], page: Path, module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    written(page)
    test = getattr(importlib.import_module(module), name)
    result = test(*[monkeypatch] * ("monkeypatch" in parameters(test)))
    if inspect.isawaitable(result):
        await result


HOOKS = [
    (page, found["flag"], found["hook"])
    for page in [*WITH_EXAMPLES, PAGES.parent / "environments.md"]
    for found in FLAG.finditer(page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("page", "flag", "hook"), HOOKS, ids=lambda value: getattr(value, "stem", value))
def test_the_hook_of_a_command_is_one(written: Callable[[Path], None], page: Path, flag: str, hook: str) -> None:
    written(page)
    LOADS[flag](hook, flag)


def parameters(function: Callable[..., object]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_an_engine_takes_what_the_project_gives(written: Callable[[Path], None]) -> None:
    written(PAGES / "engine.md")
    module = importlib.import_module("my_engine")
    assert parameters(module.MY_ENGINE.command) == parameters(ServerCommand.__call__)
    for name in ("encode", "decode"):
        assert parameters(getattr(module.MyServer, name)) == parameters(getattr(InferenceServer, name))


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_every_page_has_an_example_with_a_test_and_is_listed(page: Path) -> None:
    if page.stem != "README":
        assert any(module.startswith("test_") for module in files(page))
        assert f"]({page.name})" in (PAGES / "README.md").read_text()
