"""Mutation testing: do the fast tests notice a small mistake in the core?

Makes random one-point mutants (scripts/mutants.py), each in a copy of the working tree, and runs the fast tests that
import the changed file there, nearest first, until one fails. From the repository root:

    .venv/bin/python scripts/mutate.py                                       # 100 mutants of the core
    .venv/bin/python scripts/mutate.py --only miles_async/staleness --count 30 --seed 7

A mutant that passes every test is listed with its change: it wants a test, or, if no test could ever tell it from the
original, an entry with the reason in scripts/equivalent_mutants.toml. The tests really run with the mistake in place,
so never point this at code that removes directories or ends processes.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import multiprocessing
import os
import queue
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from mutants import Mutant, find_mutants

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENTS = ROOT / "scripts" / "equivalent_mutants.toml"
CORE = (
    "miles_async/staleness",
    "miles_async/ledger",
    "miles_async/train_data",
    "miles_async/algorithms",
    "miles_async/controller.py",
    "miles_async/rollout/dispatcher.py",
    "miles_async/weights/publisher.py",
    "miles_async/engines/client.py",
)
FAST_TESTS = ("tests/unit", "tests/property", "tests/simulation")
TESTS_OF_TEXT = ("tests/property/test_mutants.py",)  # finds its own places by their text, so any change would fail it
AT_ONCE = 2
MEMORY = 8 << 30  # bytes of data of one pytest process: a loop that never ends may collect something
PRELOADED = ("hypothesis", "numpy", "msgspec", "aiohttp", "torch", "transformers", "pytest", "xdist", "pytest_asyncio")
OUTPUT = "pytest.out"
SLACK = 60.0  # seconds for the start of pytest on a busy machine


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one mutant: ``killed_by`` is a test, "time" or "" for one that survived."""

    path: str
    mutant: Mutant
    lines: tuple[str, str]
    killed_by: str = ""
    equivalent: str = ""  # the reason why no test can kill it

    @property
    def word(self) -> str:
        return "equivalent" if self.equivalent else "killed" if self.killed_by else "SURVIVED"


# --------------------------------------------------------------------------------------------- which tests
def import_graph(root: Path) -> dict[str, set[str]]:
    """File → files of this project that it imports or, as registries do, names as ``module:attr``, and cli.py as the
    rest of a module's name; paths relative to ``root``.
    """
    files = [path for top in ("miles_async", "tests") for path in sorted((root / top).rglob("*.py"))]
    modules = {".".join(path.relative_to(root).with_suffix("").parts): path for path in files}
    graph = {}
    for path in files:
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and ":" in node.value:
                named = node.value.partition(":")[0]  # in f"{HERE}.losses.gspo:Gspo" the part from the dot on
                names.update((name for name in modules if name.endswith(named)) if named.startswith(".") else [named])
            elif path == root / "miles_async/cli.py" and isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(f"miles_async.commands.{node.value}")
        graph[str(path.relative_to(root))] = {str(modules[name].relative_to(root)) for name in names if name in modules}
    return graph


def tests_that_import(module: str, graph: dict[str, set[str]]) -> list[str]:
    """Fast test files that import a source file, also through others; the shortest chain of imports first."""
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for path, imported in graph.items():
        for other in imported:
            importers[other].add(path)
    distance = {module: 0}
    reached = [module]
    for path in reached:
        for importer in sorted(importers[path] - distance.keys()):
            distance[importer] = distance[path] + 1
            reached.append(importer)
    folders = [Path("tests/unit", folder) for folder in Path(module).relative_to("miles_async").parents]
    mirror = f"{next(folder for folder in folders if (ROOT / folder).is_dir())}/"

    def is_near(path: str) -> bool:
        """Many unit tests reach the core through a fake or an adapter, and say nothing about it."""
        return not path.startswith("tests/unit/") or path.startswith(mirror) or distance[path] == 1

    tests = [path for path in reached if path.startswith(FAST_TESTS) and Path(path).name.startswith("test_")]
    return [path for path in tests if path not in TESTS_OF_TEXT and is_near(path)]


# --------------------------------------------------------------------------------------------- running them
class Tree:
    """A copy of the working tree, in which one pytest runs at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file() or (ROOT / name).is_symlink():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name, follow_symlinks=False)

    @contextlib.contextmanager
    def mutated(self, path: str, mutant: Mutant) -> Iterator[None]:
        source = (self.root / path).read_bytes()
        self._write(path, mutant.apply(source))
        try:
            yield
        finally:
            self._write(path, source)

    def _write(self, path: str, source: bytes) -> None:
        file = self.root / path
        file.write_bytes(source)
        # A compiled file counts as current by second and size, which a mutant may share with the original.
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
            compiled.unlink()

    def pytest(self, *arguments: str, seed: int, limit: float) -> tuple[int | None, str]:
        """Exit status, or None after ``limit`` seconds, and what pytest wrote."""
        settings = ["-q", "--tb=no", "--no-header", "-p", "no:cacheprovider", f"--hypothesis-seed={seed}"]
        # A test over its time ends pytest: an exception in it would make hypothesis run the endless example again.
        settings += ["--timeout-method=thread", f"--basetemp={self.root}-tmp"]
        command = [*settings, *arguments]
        # Forked from a process that has imported what takes longest: imports would be most of a mutant's time.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        process = context.Process(target=run_pytest, args=(self.root, command))
        process.start()
        process.join(limit)
        status = process.exitcode
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with whatever the tests started
        process.kill()
        process.join()
        return status, (self.root / OUTPUT).read_text(errors="replace")


def run_pytest(root: Path, arguments: list[str]) -> None:
    """In a process and a process group of its own: pytest on the tree in ``root``, and nothing of ours in its way."""
    os.setsid()
    os.chdir(root)
    with open(OUTPUT, "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    ours = {ROOT, ROOT / "scripts"}
    sys.path[:] = [str(root), *(path for path in sys.path if Path(path).resolve() not in ours)]
    os.environ["PYTHONPATH"] = str(root)
    for name in [name for name in sys.modules if name.split(".")[0] in ("miles_async", "tests")]:
        del sys.modules[name]  # a process has one fork server, which may have imported our sources for others
    import pytest

    status = int(pytest.main(arguments))
    sys.stdout.flush()
    os._exit(status)


def time_tests(tree: Tree, tests: list[str], seed: int) -> dict[str, float]:
    """Seconds of every test file on the code as it is, where all of them must pass."""
    report = tree.root / "report.xml"
    status, output = tree.pytest("-n", str(AT_ONCE), f"--junitxml={report}", *tests, seed=seed, limit=3600)
    if status != 0:
        sys.exit(f"error: without any mutant the tests must pass, found exit status {status}:\n{output}")
    seconds = dict.fromkeys(tests, 0.0)
    for case in ET.parse(report).iter("testcase"):
        module = case.get("classname", "").replace(".", "/")
        seconds[next(test for test in tests if f"{module}/".startswith(f"{test.removesuffix('.py')}/"))] += float(
            case.get("time", 0)
        )
    return seconds


def try_mutant(tree: Tree, path: str, mutant: Mutant, tests: list[str], seconds: dict[str, float], seed: int) -> str:
    """The first test that fails with the mutant in place, "time" if it hangs, or "" if all pass or there is none."""
    if not tests:  # of which pytest would make all
        return ""
    with tree.mutated(path, mutant):
        status, output = tree.pytest("-x", *tests, seed=seed, limit=SLACK + 4 * sum(seconds[test] for test in tests))
    if status is None:
        return "time"
    if status == 0:
        return ""
    if status in (4, 5):  # pytest's for a wrong call and for no tests
        sys.exit(f"error: pytest must pass or fail, found exit status {status}:\n{output}")
    failed = [line.split()[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0] if failed else "time" if "+ Timeout +" in output else f"exit status {status}"


# --------------------------------------------------------------------------------------------- choosing, reporting
def choose(paths: list[str], count: int, seed: int) -> list[tuple[str, Mutant]]:
    """``count`` random mutants of the files at and below ``paths``."""
    files = [file for path in paths for file in ([path] if path.endswith(".py") else sorted(python_files(path)))]
    found = [(file, mutant) for file in files for mutant in find_mutants((ROOT / file).read_bytes())]
    return random.Random(seed).sample(found, min(count, len(found)))


def python_files(folder: str) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py")]


def known_equivalents() -> dict[tuple[str, str, str], str]:
    """(file, line as it is, line as the mutant makes it) → the reason why no test can tell them apart."""
    entries = tomllib.loads(EQUIVALENTS.read_text(encoding="utf-8")).get("mutant", [])
    return {(entry["file"], entry["old"], entry["new"]): entry["reason"] for entry in entries}


def run(chosen: list[tuple[str, Mutant]], seed: int) -> Iterator[Outcome]:
    """Try the mutants, several at once; yields each outcome as it comes."""
    graph = import_graph(ROOT)
    equivalents = known_equivalents()
    tried = []
    for path, mutant in chosen:
        lines = mutant.changed_lines((ROOT / path).read_bytes())
        if reason := equivalents.get((path, *lines)):
            yield Outcome(path=path, mutant=mutant, lines=lines, equivalent=reason)
        else:
            tried.append((path, mutant, lines))
    if not tried:
        return
    tests = {path: tests_that_import(path, graph) for path, _, _ in tried}
    trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        for number in range(AT_ONCE):
            trees.put(Tree(Path(folder) / f"tree-{number}"))

        first = trees.get()
        seconds = time_tests(first, sorted({test for some in tests.values() for test in some}), seed)
        trees.put(first)

        def attempt(path: str, mutant: Mutant, lines: tuple[str, str]) -> Outcome:
            tree = trees.get()
            try:
                killed_by = try_mutant(tree, path, mutant, tests[path], seconds, seed)
            finally:
                trees.put(tree)
            return Outcome(path=path, mutant=mutant, lines=lines, killed_by=killed_by)

        for future in as_completed([pool.submit(attempt, *each) for each in tried]):
            yield future.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100, help="mutants to try")
    parser.add_argument("--seed", type=int, default=0, help="chooses the mutants, and the examples of property tests")
    parser.add_argument("--only", nargs="+", default=list(CORE), metavar="PATH", help="files or folders to mutate")
    parser.add_argument("--threshold", type=float, default=0.95, help="share to be killed for exit status 0")
    arguments = parser.parse_args()
    for path in arguments.only:
        if Path(path).parts[:1] != ("miles_async",) or not Path(path).exists():
            parser.error(f"--only {path}: expected a file or folder below miles_async/")

    chosen = choose(arguments.only, arguments.count, arguments.seed)
    outcomes: list[Outcome] = []
    began = time.monotonic()
    for outcome in run(chosen, arguments.seed):
        outcomes.append(outcome)
        place = f"{outcome.path}:{outcome.mutant.line}"
        print(
            f"{len(outcomes)}/{len(chosen)}  {time.monotonic() - began:4.0f} s  {outcome.word:10}  {place}  "
            f"{outcome.mutant.kind}  {outcome.killed_by}",
            flush=True,
        )
    survivors = [outcome for outcome in outcomes if outcome.word == "SURVIVED"]
    equivalent = [outcome for outcome in outcomes if outcome.equivalent]
    for outcome in [*equivalent, *survivors]:
        print(f"\n{outcome.word} {outcome.path}:{outcome.mutant.line} ({outcome.mutant.kind})  {outcome.equivalent}")
        print(f"  - {outcome.lines[0]}\n  + {outcome.lines[1]}")
    judged = len(outcomes) - len(equivalent)
    killed = judged - len(survivors)
    share = killed / judged if judged else 1.0
    print(f"\n{killed} of {judged} mutants killed ({share:.0%}); {len(equivalent)} more are equivalent")
    return 0 if share >= arguments.threshold else 1


if __name__ == "__main__":
    sys.exit(main())
