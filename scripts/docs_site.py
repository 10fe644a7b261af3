"""Build the site of the pages into build/site. Run by `make docs`; a broken link or a page without a place in the
navigation (mkdocs.yml) is an error.

The site has the layout of the tree, so that links between pages are the same in both. Files that are no pages, such
as examples' `.args`, are copied when a page links to them. GENERATED are pages that only the site has, and TABLES
parts of other pages.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from miles_async.arguments.parser import build_parser
from miles_async.observability.metric_names import sections
from scripts import behaviours, families_page

ROOT = Path(__file__).resolve().parent.parent
SOURCE, ENVIRONMENT = ROOT / "build" / "pages", ROOT / ".venv" / "docs"
LOCK = ROOT / "requirements" / "docs.lock"
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/**/*.md",
    "examples/*/README.md",
    "deploy/*.md",
)
LINK = re.compile(r"\]\(([^)\s#:]+)(?:#[^)]*)?\)")
FLAG = re.compile(r"(?<![\w`/-])--[a-zA-Z][\w-]*")
SPECIAL = re.compile(r"[*_<>\[\]|]")


def flags_page() -> str:
    """Every flag of `miles-async train`, by group, from the parser that prints `--help-all`."""
    lines = [
        "# Flags",
        "",
        "The flags of `miles-async train`, as `--help-all` prints them. Fields of Megatron's configs are",
    ]
    lines += ["set by `--megatron-X`; `--help-megatron` lists them.", ""]
    for group in build_parser("miles-async train")._action_groups:
        actions = group._group_actions
        lines += [f"## {group.title}", "", *([group.description, ""] if group.description else [])] if actions else []
        for action in actions:
            value = "" if action.nargs == 0 else f" {action.metavar}" + (" ..." if action.nargs == "*" else "")
            text = SPECIAL.sub(r"\\\g<0>", (action.help or "").replace("%%", "%"))
            lines += [f"### `{', '.join(action.option_strings)}{value}` {{ #{action.dest} }}", ""]
            lines += [FLAG.sub(r"`\g<0>`", text), ""]
    return "\n".join(lines)


def metrics_tables() -> str:
    """A section per section of the registry of metrics."""
    parts = []
    for section in sections():
        rows = "\n".join(f"| {row.names} | {row.unit} | {row.meaning} | {row.worries} |" for row in section.rows)
        table = f"| metric | unit | meaning | look closer when |\n|---|---|---|---|\n{rows}"
        parts += [
            part for part in (f"## {section.title}", section.before.strip(), table, section.after.strip()) if part
        ]
    return "\n\n".join(parts) + "\n"


GENERATED: Mapping[str, Callable[[], str]] = {"docs/flags.md": flags_page, "tests/behaviours.md": behaviours.page}
TABLES: Mapping[str, Callable[[], str]] = {"docs/metrics.md": metrics_tables, "docs/families.md": families_page.tables}


def text_of(page: Path) -> str:
    """The text of a page on the site."""
    tables = TABLES.get(str(page.relative_to(ROOT)))
    return page.read_text() + (f"\n{tables()}" if tables else "")


def pages() -> Iterator[Path]:
    for pattern in PAGES:
        yield from sorted(ROOT.glob(pattern))


def collect() -> None:
    """Copy pages and the files that they link to; write the generated pages."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    for page in pages():
        text = text_of(page)
        write(page, text)
        for path in ((page.parent / target).resolve() for target in LINK.findall(text)):
            if path.is_file() and path.suffix != ".md":
                write(path, path.read_bytes())
    for name, generate in GENERATED.items():
        write(ROOT / name, generate())


def write(path: Path, content: str | bytes) -> None:
    """Write the file of the site that has the place of ``path`` in the tree."""
    copy = SOURCE / path.relative_to(ROOT)
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(content if isinstance(content, bytes) else content.encode())


def install() -> None:
    """Install docs.lock into an environment of the site's own, unless it is there."""
    stamp, wanted = ENVIRONMENT / "stamp", hashlib.sha256(LOCK.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], check=True)
    packages = ["--quiet", "--no-deps", "--requirement", str(LOCK)]
    subprocess.run([str(ENVIRONMENT / "bin/python"), "-m", "pip", "install", *packages], check=True)
    stamp.write_text(wanted)


if __name__ == "__main__":
    install()
    collect()
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # an announcement of the theme's authors
    command = [str(ENVIRONMENT / "bin/python"), "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(command, cwd=ROOT, env=quiet)
    if done.returncode:
        sys.exit("error: the site has broken links or pages without a place (see above); nav is in mkdocs.yml.")
    print(f"open {ROOT / 'build/site/index.html'}")
